"""When every action of a program runs: a graph, and the times of its nodes."""
