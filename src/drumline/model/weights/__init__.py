"""A model's tensors: tied, left out, read from files, initialised."""
