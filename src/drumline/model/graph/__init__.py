"""The calls of a traced forward, and Python functions that repeat some of them."""
