"""What a model takes on this device: seconds and bytes, block by block."""
