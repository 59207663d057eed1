"""Pictures of a timeline, simulated or measured: grid, SVG, page, trace, and plain charts."""
