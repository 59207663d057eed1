"""What a checkpoint is on disk, whole or not there at all; it knows no pipeline, only that something saves."""
