"""The best program under a memory limit: bounds, constructions, and local search on the simulator."""
