"""Run backwards: whole, or split into I and W, eagerly or compiled."""
