"""What is searched, lower bounds that no program can beat, each with its proof, and the optimum of small instances."""
