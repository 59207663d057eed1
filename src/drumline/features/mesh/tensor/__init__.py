"""Tensor parallelism: which matrices are divided over the axis tp, and what their layers exchange."""
