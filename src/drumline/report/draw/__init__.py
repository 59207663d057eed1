"""Pictures of a timeline, simulated or measured: grid, SVG, page, trace, plain charts; tables as text."""
