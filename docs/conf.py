"""Sphinx settings; the pictures are drawn by the tool itself, anew at every build."""

from pathlib import Path

from drumline.core.costs import Costs
from drumline.core.idle import Limit
from drumline.core.placement import Placement
from drumline.core.simulate import simulate
from drumline.plan.search.pareto import pareto
from drumline.plan.search.search import search
from drumline.report.pareto import pareto_svg
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
made = {name: svg(simulate(schedule.build(4, 8)), width=900) for name, schedule in schedules().items()}
heavy = (1, 1, 1, 1.6)
found = search(Costs(heavy, heavy, heavy), Placement.linear(4), num_microbatches=8, limit=Limit(max_activations=3))
made["search-head"] = svg(found.timeline, width=900, title="searched, a heavy head in three activations")
front = pareto(Costs(0.5, 0.5, 0.5), 4, num_microbatches=6, placement="v", tries=300, seconds=60)
made["search-pareto"] = pareto_svg(front, width=900)
for name, drawn in made.items():
    path = pictures / f"{name}.svg"
    if not path.exists() or path.read_text(encoding="utf-8") != drawn:
        path.write_text(drawn, encoding="utf-8")
