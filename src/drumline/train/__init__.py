"""Whole training jobs: what is trained, on what, and what came of it."""
