"""Layers that models may be built from, and how lines may divide layers: no pipeline is needed for either."""
