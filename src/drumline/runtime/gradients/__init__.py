"""What becomes of gradients at the end of a step: exchanged, clipped, looked at."""
