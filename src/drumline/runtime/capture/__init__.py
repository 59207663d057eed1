"""Capture steps as graphs that a device replays; the only folder that names CUDA."""
