"""When every node of a graph runs: rows become a graph, and the graph gets its times."""
