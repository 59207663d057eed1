"""Checkpoints: a pipeline's state on disk, whole or not there at all, for any cut, schedule and number of ranks."""
