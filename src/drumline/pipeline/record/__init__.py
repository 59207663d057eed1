"""What a pipeline notes of its steps, and where that is written."""
