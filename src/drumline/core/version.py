"""The version of Drumline: what the package is built with, and what a tree that is not installed says of itself."""

__version__ = "0.1.0"
