"""Updates that are made before all ranks agree on them, and undone where they were wrong."""
