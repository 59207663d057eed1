"""A config and the files that it names, read and looked at before anything starts, without PyTorch."""
