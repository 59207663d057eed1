"""Runs one rank's row: executor, stages, segments, and what a step needs of batches, values and random numbers."""
