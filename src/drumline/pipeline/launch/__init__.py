"""Local ranks from a script or a notebook: processes, what goes to them and what comes back."""
