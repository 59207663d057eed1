"""Sphinx settings; the pictures are drawn by the tool itself, anew at every build."""

from pathlib import Path

from drumline.core.simulate import simulate
from drumline.report.analysis import analyze
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
drawings = {name: svg(simulate(schedule.build(4, 8)), width=900) for name, schedule in schedules().items()}
for folder in sorted((Path(__file__).parent / "traces").iterdir()):
    recorded = analyze([folder]).timeline
    drawings[f"recorded-{folder.name}"] = svg(recorded, width=900, title=f"{recorded.program.name} as recorded")
for name, drawn in drawings.items():
    path = pictures / f"{name}.svg"
    if not path.exists() or path.read_text(encoding="utf-8") != drawn:
        path.write_text(drawn, encoding="utf-8")
