"""What a pipeline records about its steps, and where it writes this."""
