"""Where batches come from: text, tokens, instructions or points, in an order that a seed decides alone."""
