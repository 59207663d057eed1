"""A plan for a profiled model: its blocks as numbers, the ranks, the candidates, the choice and its reasons."""
