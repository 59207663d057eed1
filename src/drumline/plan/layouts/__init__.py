"""Which layout to run on a cluster: all legal ones are looked at, the best simulated, the choice explained."""
