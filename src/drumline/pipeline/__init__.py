"""The public pipeline: how to set up, cut and connect it, and how to run steps."""
