"""Optimizers and what they update: made, scaled, checked before or after, and undone."""
