"""Run one rank's row, job by job."""
