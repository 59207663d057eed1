"""A step of the unsplit model in one process, what lines of a mesh have of it, and how far results are apart."""
