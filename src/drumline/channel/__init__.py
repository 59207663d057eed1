"""What ranks send each other: the interface for the executor, the control mesh, and one file per transport."""
