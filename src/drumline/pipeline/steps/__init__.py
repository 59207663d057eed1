"""One step of a pipeline: what it is called with, its parts in the order in which they run, and its result."""
