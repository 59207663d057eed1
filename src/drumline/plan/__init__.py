"""Deciding before running: where a model is cut, from numbers alone."""
