"""Slices of sequences: attention of a slice sees the keys and values of the slices before it."""
