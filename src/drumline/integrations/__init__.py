"""Trainers of other libraries on a pipeline: each module is imported by itself, and with it the library."""
