"""Measure this device kernel by kernel, and whole steps of a plain model, for forecasts of steps on it."""
