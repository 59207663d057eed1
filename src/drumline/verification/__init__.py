"""Compare a whole pipeline with one process: what `verify` runs, and what came of it."""
