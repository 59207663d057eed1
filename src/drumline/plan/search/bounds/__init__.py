"""What no program can go below, each bound with its proof, and the exact optimum of small instances."""
