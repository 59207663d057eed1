"""Trace a model's forward: what it calls, reads and sets, and what no piece could repeat."""
