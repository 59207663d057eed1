"""Search for the best program under a memory limit: bounds, constructions, and local search with the simulator."""
