"""Compare a pipeline with one process: the unsplit model, the check of the first step, and agreement between ranks."""
