"""Sparse mixtures of experts: the block, and experts that the lines of a mesh divide between them."""
