project = "Drumline"
author = "The Drumline authors"
copyright = "The Drumline authors, Apache-2.0"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Drumline"
myst_heading_anchors = 3
