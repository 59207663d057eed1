"""Lengths and orders of slices: what they take, the search for the best, its bound, and whether a plan uses them."""
