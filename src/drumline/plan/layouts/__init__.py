"""Which layout to run on a cluster: consider all legal layouts, simulate the best, explain the choice."""
