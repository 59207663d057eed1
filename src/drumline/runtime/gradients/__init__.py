"""What happens to gradients at the end of a step: exchange, clipping, checks."""
