"""When every action of a program runs, and what its rank holds: rows as arrays, a graph, and the times of its nodes."""
