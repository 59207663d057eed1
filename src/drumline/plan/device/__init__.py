"""A plan for a model that was profiled: its blocks as numbers, the ranks, candidates, the choice and its reasons."""
