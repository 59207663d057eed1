"""Sphinx settings; the pictures are drawn by the tool itself, anew at every build."""

import json
import re
from pathlib import Path
from typing import Any

from drumline.core.costs import Costs
from drumline.core.measured.measured import Measured
from drumline.core.measured.record import Record
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.whole import join
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.cluster.hardware import cluster
from drumline.plan.cluster.models import model
from drumline.plan.layouts.explain import explain
from drumline.plan.layouts.planner import plan
from drumline.plan.search.pareto import pareto
from drumline.plan.search.search import search
from drumline.report.compare import compare
from drumline.report.draw.chart import Series, chart
from drumline.report.draw.pareto import pareto_svg
from drumline.report.draw.svg import svg
from drumline.report.kineto.analysis import analyze
from drumline.report.plan.page import best_svg, pareto_chart, scaling_chart
from drumline.schedules import generate, schedules

project = "Drumline"
author = "The Drumline authors"
copyright = "The Drumline authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build", "mesh-steps.json", "scaling.json", "scaling-train.json"]
html_theme = "furo"
html_title = "Drumline"
html_static_path = ["_static"]
html_css_files = ["drumline.css"]
myst_heading_anchors = 3
add_module_names = False
autodoc_member_order = "bysource"
autodoc_typehints = "none"

MESH_STEPS = {
    "overlap": "PP2 x DP2: exchanges while other stages compute",
    "at end": "PP2 x DP2: all exchanges at the end",
    "zero 3": "PP2 x DP2 with zero=3: stages gathered ahead of their use",
}

here = Path(__file__).parent
pictures = here / "pictures"


def bubble_by_microbatches() -> str:
    counts = (4, 8, 16, 32, 64, 128)
    names = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min")
    rows = {
        count: {row.name: row for row in compare(8, num_microbatches=count)}
        for count in counts
    }
    series = [
        Series(name, [(count, rows[count][name].timeline.bubble) for count in counts])
        for name in names
    ]
    return chart(
        series, title="8 ranks", x_label="microbatches", y_label="bubble", log_x=True
    )


def scaling() -> str:
    counts = (1, 2, 4, 8, 16)
    measured = json.loads((here / "scaling.json").read_text(encoding="utf-8"))["scaling"]
    bounds = [
        1 - simulate(schedules()["1f1b"].build(2, count)).bubble for count in counts
    ]
    series = [
        Series(
            "speed-up on the same work: simulated",
            [(m, 2 * one) for m, one in zip(counts, bounds, strict=True)],
        ),
        Series(
            "measured",
            [(row["microbatches"], row["strong"]) for row in measured],
            marks=True,
        ),
        Series(
            "efficiency with twice the layers: simulated",
            list(zip(counts, bounds, strict=True)),
        ),
        Series(
            "measured",
            [(row["microbatches"], row["weak"]) for row in measured],
            marks=True,
        ),
    ]
    return chart(
        series,
        title="Two ranks",
        x_label="microbatches",
        y_label="times one rank",
        log_x=True,
    )


def eight_ranks(kind: str, title: str) -> str:
    rows = json.loads((here / "scaling-train.json").read_text(encoding="utf-8"))
    series = []
    for name in ("1f1b", "zb-h1"):
        own = [
            row
            for row in rows["scaling"]
            if (row["kind"], row["schedule"]) == (kind, name)
        ]
        for key, label in (("bound", "bound"), ("simulated", "simulated")):
            if key in own[0]:
                points = [(row["ranks"], row[key]) for row in own]
                series.append(Series(f"{name}: {label}", points))
        points = [(row["ranks"], row["speedup"]) for row in own]
        series.append(Series(f"{name}: measured", points, marks=True))
    return chart(
        series, title=title, x_label="ranks", y_label="times one rank", log_x=True
    )


def mesh_steps() -> dict[str, str]:
    """Draw steps of two lines, as `benchmarks/meshes.py --timelines` wrote them."""
    given = json.loads((here / "mesh-steps.json").read_text(encoding="utf-8"))
    found = {}
    for name, title in MESH_STEPS.items():
        step = given["interleaved-1f1b"][name]
        records = tuple(Record.from_json(one) for one in step["records"])
        measured = Measured(Program.parse(step["program"], step["name"]), records)
        found[f"mesh-{name.replace(' ', '-')}"] = svg(measured, width=900, title=title)
    return found


drawn = {
    name: svg(simulate(schedule.build(4, 8)), width=900)
    for name, schedule in schedules().items()
}
drawn |= {"bubble-by-microbatches": bubble_by_microbatches(), "scaling": scaling()}
drawn |= mesh_steps()
drawn["scaling-strong"] = eight_ranks("strong", "The same GPT on more ranks")
drawn["scaling-weak"] = eight_ranks("weak", "A GPT that grows with the ranks")
pictures.mkdir(exist_ok=True)
for folder in sorted((here / "traces").iterdir()):
    recorded = analyze([folder]).timeline
    drawn[f"recorded-{folder.name}"] = svg(
        recorded, width=900, title=f"{recorded.program.name} as recorded"
    )
heavy = (1, 1, 1, 1.6)
found = search(
    Costs(heavy, heavy, heavy),
    Placement.linear(4),
    num_microbatches=8,
    limit=Limit(max_activations=3),
    tries=2000,
)
drawn["search-head"] = svg(
    found.timeline, width=900, title="searched, a heavy head in three activations"
)
drawn["frozen-base"] = svg(
    simulate(
        join(generate("zb-v", num_ranks=4, num_microbatches=8), [True] * 8),
        Costs(0.5, 0.5, 0),
    ),
    width=900,
    title="zb-v over a frozen base: F = I, no W, whole backwards",
)
unequal = Costs(microbatch_factor=[0.4, 0.6, 1.5, 2, 1, 0.5])
drawn["lengths-ordered"] = svg(
    simulate(generate("1f1b", num_ranks=2, num_microbatches=6), unequal),
    width=900,
    title="1f1b, unequal microbatches, the longest in the middle",
)
front = pareto(Costs(0.5, 0.5, 0.5), 4, num_microbatches=6, placement="v", tries=300)
drawn["search-pareto"] = pareto_svg(front, width=900)
planned = explain(plan(model("gpt-39.1b"), cluster("a100-40", 64), batch=64))
assert planned.reasons is not None
drawn |= {
    "plan-best": best_svg(planned.plan),
    "plan-pareto": pareto_chart(planned.plan, planned.reasons, width=900),
}
drawn["plan-scaling"] = scaling_chart(planned.reasons, width=900)
for name, picture in drawn.items():
    path = pictures / f"{name}.svg"
    if not path.exists() or path.read_text(encoding="utf-8") != picture:
        path.write_text(picture, encoding="utf-8")


def as_restructured(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Write code in docstrings as Sphinx reads it: one backtick there is two here."""
    lines[:] = [re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``", line) for line in lines]


def setup(app: Any) -> None:
    """Let Sphinx read our docstrings."""
    app.connect("autodoc-process-docstring", as_restructured)
