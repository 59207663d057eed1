"""Quantised weights: packed tensors and their parts, layers that are replaced by quantised ones, values from files."""
