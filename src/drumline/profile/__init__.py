"""Measure a model on this device: seconds and bytes of every block."""
