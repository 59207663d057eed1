"""What attaches to a pipeline: each folder is one feature, and none imports another."""
