"""Capture steps as graphs that a device replays; the only folder that uses CUDA's own interface."""
