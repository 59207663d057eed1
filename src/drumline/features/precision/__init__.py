"""Low precision: a scaled loss, and float32 copies of parameters."""
