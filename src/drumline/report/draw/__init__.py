"""Pictures of a timeline, simulated or measured: grid, SVG, page, trace, plain charts; tables and numbers as text."""
