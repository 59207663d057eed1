"""The training loop: steps, updates, evaluation, samples, and what is told about them."""
