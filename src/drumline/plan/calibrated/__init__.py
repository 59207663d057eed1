"""Forecast a step on one calibrated device: its kernels, its host's time, its memory, and how far to trust them."""
