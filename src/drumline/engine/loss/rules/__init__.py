"""Compare a loss with itself on fewer rows, to find how much each microbatch counts."""
