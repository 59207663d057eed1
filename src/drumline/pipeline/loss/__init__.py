"""How much each microbatch counts in the loss of the batch."""
