"""The ranks of a pipeline: how they connect, agree, and tell each other the outcome of each step."""
