"""Updates that are made before all ranks agree on them, and taken back where they were wrong."""
