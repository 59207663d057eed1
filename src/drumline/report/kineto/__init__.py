"""Somebody else's run: from the files of PyTorch's profiler to a timeline with causes."""
