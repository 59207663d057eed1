"""Run one rank's row: executor, stages, segments, and the batches, values and random numbers of a step."""
