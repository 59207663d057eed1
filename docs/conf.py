"""Sphinx settings; the pictures are drawn by the tool itself, anew at every build."""

from pathlib import Path

from drumline.core.simulate import simulate
from drumline.report.svg import svg
from drumline.schedules import schedules

project = "Drumline"
author = "The Drumline authors"
copyright = "The Drumline authors, Apache-2.0"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Drumline"
myst_heading_anchors = 3

pictures = Path(__file__).parent / "pictures"
pictures.mkdir(exist_ok=True)
for name, schedule in schedules().items():
    drawn = svg(simulate(schedule.build(4, 8)), width=900)
    path = pictures / f"{name}.svg"
    if not path.exists() or path.read_text(encoding="utf-8") != drawn:
        path.write_text(drawn, encoding="utf-8")
