"""Lower bounds that no program can beat, each with its proof, and the exact optimum of small instances."""
