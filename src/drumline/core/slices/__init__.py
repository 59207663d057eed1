"""Slices of sequences in a program: units, the rule of their order, their text, seconds and bytes."""
