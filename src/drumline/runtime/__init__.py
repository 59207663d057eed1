"""Run a rank's stages: segments and what they keep, the batches of a step, and what a rank notes of it."""
