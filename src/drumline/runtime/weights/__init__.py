"""A model's tensors by name: catalogued, tied, copied, read from files, initialised."""
