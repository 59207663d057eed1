"""Start local ranks from a script or a notebook: processes, what they receive and what they return."""
