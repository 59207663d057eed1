"""Checks whether a program can run: one file per kind of rule, and the message for each violation. Ignores time."""
