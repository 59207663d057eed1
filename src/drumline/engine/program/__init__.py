"""The programs that a pipeline runs: found, proven to fit, and without what its model does not need."""
