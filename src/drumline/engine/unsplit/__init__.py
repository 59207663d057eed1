"""The unsplit model in one process: run by itself, left as it was, and compared."""
