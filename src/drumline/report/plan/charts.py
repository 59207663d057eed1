"""The pictures of a cluster plan: steps of the best layouts by item, throughput against memory, scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drumline.report.draw.chart import Bar, Series, bars, chart
from drumline.report.plan.text import SECONDS
from drumline.report.units import duration

Figures = Mapping[str, Any]

_GIB = 2.0**30
# Work in greens, communication in blues, what nobody gains from in warm colours.
HUES = {
    "compute": "#159f78",
    "recompute": "#8fd3bd",
    "tensor": "#0b6aa8",
    "context": "#4aa3df",
    "expert": "#7f6fc4",
    "pipeline": "#9ccbee",
    "data_exposed": "#b576bd",
    "bubble": "#ef8759",
    "optimizer": "#e3c13f",
}


def best_svg(figures: Figures, *, width: int = 900) -> str:
    """Return the best layout of each mesh as stacked bars of seconds."""
    rows = [
        Bar(
            one["mesh"],
            {SECONDS[item]: one["seconds"][item] for item in SECONDS},
            duration(one["step_seconds"]),
        )
        for one in figures["best"]
    ]
    hues = {SECONDS[item]: hue for item, hue in HUES.items()}
    title = (
        f"{figures['model']['name']} on {figures['cluster']['num_devices']} x {figures['cluster']['device']['name']}"
    )
    return bars(rows, hues, title=title, x_label="seconds of a step, the best layout of each mesh", width=width)


def pareto_chart(figures: Figures, *, width: int = 720) -> str:
    """Return throughput against memory: the fastest layout of each memory, the choice, and the limit."""
    front = [(one["peak_bytes"] / _GIB, one["tokens_per_second"] / 1e3) for one in figures["pareto"]]
    limit, chosen = figures["limit_bytes"] / _GIB, figures["chosen"]
    others = [
        (one["peak_bytes"] / _GIB, one["tokens_per_second"] / 1e3) for one in figures["best"][1:] + figures["changes"]
    ]
    most = 1.05 * max(x for x, _ in front)
    shown = [point for point in others if point[0] <= most]
    series = [
        Series("the fastest layout in so much memory", front),
        Series("what a device may hold", [(limit, 0.0), (limit, max(y for _, y in front))], dashed=True),
    ]
    if shown:
        series.append(Series("other meshes, and the choice with one setting changed", shown, marks=True))
    series.append(Series("chosen", [(chosen["peak_bytes"] / _GIB, chosen["tokens_per_second"] / 1e3)], marks=True))
    return chart(
        series,
        title="Throughput against memory",
        x_label="GiB that the fullest device holds",
        y_label="thousand tokens a second",
        width=width,
        x_from=0.0,
    )


def scaling_chart(figures: Figures, *, width: int = 720) -> str:
    """Return strong and weak scaling: throughput per device as a share of the smallest cluster's."""
    series = []
    for name, words in (("strong", "strong: the same batch"), ("weak", "weak: the batch grows with the devices")):
        points = [
            (float(one["devices"]), one["efficiency"])
            for one in figures["scaling"][name]
            if one["efficiency"] is not None
        ]
        if points:
            series.append(Series(words, points))
    return chart(
        series,
        title="Scaling",
        x_label="devices",
        y_label="throughput per device, over that of the smallest cluster that fits",
        width=width,
        log_x=True,
    )
