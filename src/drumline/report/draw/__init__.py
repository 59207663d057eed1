"""A timeline as a picture: grid, SVG, page, trace, and the plain charts. Where it came from does not matter."""
