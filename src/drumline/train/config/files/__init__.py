"""Files that a config names, looked at before anything starts and without PyTorch: data, model folders, functions."""
