"""The weight of each microbatch in the loss of the batch."""
