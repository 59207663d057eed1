"""Timelines made visible. Nothing here knows where a timeline came from."""
