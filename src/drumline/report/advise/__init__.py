"""Advice: what to change, and the predicted gain."""
