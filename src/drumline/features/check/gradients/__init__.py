"""Gradients of a checked step: noted in the step, sketched, and compared with what the model gives by itself."""
