"""Moves of layers from rank to rank, between two steps of a running pipeline."""
