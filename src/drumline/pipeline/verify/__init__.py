"""Compare a pipeline with one process: the unsplit model, what `verify` does with it, and agreement between ranks."""
