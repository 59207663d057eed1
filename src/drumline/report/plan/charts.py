"""The pictures of a cluster plan: steps of the best layouts by item, throughput against memory, scaling."""

from __future__ import annotations

from drumline.plan.layouts.explain import Reasons
from drumline.plan.layouts.planner import ClusterPlan
from drumline.plan.layouts.survey import Choice
from drumline.report.draw.chart import Bar, Series, bars, chart
from drumline.report.plan.text import SECONDS
from drumline.report.units import duration

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


def best_svg(plan: ClusterPlan, *, width: int = 900) -> str:
    """Return the best layout of each mesh as stacked bars of seconds."""
    rows = [
        Bar(
            str(one.mesh),
            {name: getattr(one.estimate.seconds, item) for item, name in SECONDS.items()},
            duration(one.seconds),
        )
        for one in plan.best
    ]
    hues = {SECONDS[item]: hue for item, hue in HUES.items()}
    title = f"{plan.transformer.name} on {plan.cluster.num_devices} x {plan.cluster.device.name}"
    return bars(rows, hues, title=title, x_label="seconds of a step, the best layout of each mesh", width=width)


def pareto_chart(plan: ClusterPlan, reasons: Reasons, *, width: int = 720) -> str:
    """Return throughput against memory: the fastest layout of each memory, the choice, and the limit."""

    def point(choice: Choice) -> tuple[float, float]:
        return choice.bytes / _GIB, plan.tokens_per_second(choice) / 1e3

    front, limit = [point(one) for one in reasons.pareto], plan.limit_bytes / _GIB
    others = [point(one) for one in (*plan.best[1:], *(change.choice for change in reasons.changes))]
    most = 1.05 * max(x for x, _ in front)
    shown = [one for one in others if one[0] <= most]
    series = [
        Series("the fastest layout in so much memory", front),
        Series("what a device may hold", [(limit, 0.0), (limit, max(y for _, y in front))], dashed=True),
    ]
    if shown:
        series.append(Series("other meshes, and the choice with one setting changed", shown, marks=True))
    series.append(Series("chosen", [point(plan.chosen)], marks=True))
    return chart(
        series,
        title="Throughput against memory",
        x_label="GiB that the fullest device holds",
        y_label="thousand tokens a second",
        width=width,
        x_from=0.0,
    )


def scaling_chart(reasons: Reasons, *, width: int = 720) -> str:
    """Return strong and weak scaling: throughput per device as a share of the smallest cluster's."""
    series = []
    for name, words in (("strong", "strong: the same batch"), ("weak", "weak: the batch grows with the devices")):
        points = [(float(one.devices), share) for one, share in reasons.scaling[name] if share is not None]
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
