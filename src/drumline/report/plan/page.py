"""A cluster plan as one offline page: the choice, its seconds and bytes, why others lose, how to start it.

Its pictures are also available alone: steps of the best layouts by item, throughput against memory, scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from drumline.core.errors import counted
from drumline.core.units import duration, size_text
from drumline.plan.launch.launch import AXES, Launch, first_places, links
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.explain import Explanation, Reasons
from drumline.plan.layouts.planner import ClusterPlan
from drumline.report.draw.chart import Bar, Graph, Series, bars
from drumline.report.draw.html import asset, page_with
from drumline.report.draw.markup import BarPart, bar_row, bar_rows, card, cards, legend_html, safe, table_html
from drumline.report.draw.plot import plot
from drumline.report.draw.scene import document
from drumline.report.plan import text

_STRIPS = 8  # up to this many ranks, memory and queues are shown at first
_GIB = 2.0**30
# Work in greens, communication in blues, waste in warm colours.
HUES = {
    "compute": "#12936f",
    "recompute": "#67923a",
    "tensor": "#0f78b8",
    "context": "#4c93c2",
    "expert": "#7f6fc4",
    "pipeline": "#4f86d9",
    "data_exposed": "#a86fb3",
    "bubble": "#d06a3a",
    "optimizer": "#a8862a",
}


_time = partial(duration, micro="µs")


def plan_page(explanation: Explanation, reasons: Reasons) -> str:
    """Return the page of a plan with its reasons."""
    title, *choice = text.headline(explanation.plan)
    drawn = reasons.drawing
    data = document(
        [] if drawn is None else [drawn.timeline],
        title=f"Plan for {title}",
        advice=". ".join(choice) + ".",
        names=None if drawn is None else [drawn.shows],
        seconds=True,
    )
    if drawn is not None and drawn.timeline.program.num_microbatches < explanation.plan.chosen.layout.num_microbatches:
        data["timelines"][0]["bubble_of"] = "idle in this drawing"
    data["strips"] = drawn is not None and drawn.timeline.num_ranks <= _STRIPS  # the toolbar shows and hides them
    style = asset("report.css") + asset("plan.css")
    if drawn is None:
        style += ".toolbar, #overview, .legend, footer { display: none; }"
    return page_with(
        data, panel=_above(explanation), below=_below(explanation, reasons), style=style, extra=explanation.to_json()
    )


def _above(explanation: Explanation) -> str:
    pair = f'<div class="pair">{_seconds(explanation.plan)}{_bytes(explanation.plan)}</div>'
    return f'<section class="report plan">{_cards(explanation)}{pair}</section>'


def _below(explanation: Explanation, reasons: Reasons) -> str:
    plan = explanation.plan
    header = ["", "mesh", *text.VOLUMES, "step", "fits"]
    parts = [
        _best(explanation),
        _changes(reasons),
        _more(reasons),
        card("Bytes that a device sends per step", table_html(header, text.traffic_rows(plan, reasons))),
        *(card(graph.title, plot(graph)) for graph in (_pareto(plan, reasons), _scaling(reasons))),
        _ranks(plan),
        card("Strong and weak scaling", table_html(text.SCALING, text.scaling_rows(plan, reasons))),
        _launch(explanation.launch),
    ]
    return f'<section class="report plan"><div class="pair">{"".join(parts)}</div></section>'


def _cards(explanation: Explanation) -> str:
    plan, chosen, rate = explanation.plan, explanation.plan.chosen, explanation.plan.chosen.estimate.flops_per_second
    figures = [
        ("layout", str(chosen.mesh), text.settings_text(chosen)),
        ("step", _time(chosen.seconds), f"{plan.batch} sequences"),
        ("throughput", f"{plan.tokens_per_second(chosen):,.0f}", "tokens/s"),
        ("per GPU", f"{rate / 1e12:.0f} TFLOP/s", plan.utilisation_words(chosen)),
        ("bubble", f"{chosen.estimate.bubble:.1%}", "idle share of all ranks"),
        ("memory", size_text(chosen.bytes), f"of {size_text(plan.limit_bytes)}, {plan.headroom:.0%} headroom"),
    ]
    assumed = " ".join(f"{safe(line)}." for line in explanation.software.lines())
    return cards(figures) + f'<p class="note">The objective: {safe(explanation.objective)}. {assumed}</p>'


def _seconds(plan: ClusterPlan) -> str:
    """Return the seconds of the best layouts, each as a stacked bar."""
    longest = max(choice.seconds for choice in plan.best)
    rows = [_bar(choice, choice.estimate.seconds, text.SECONDS, longest, _time, choice.seconds) for choice in plan.best]
    spent = {item for item in text.SECONDS for c in plan.best if getattr(c.estimate.seconds, item) > 1e-9 * c.seconds}
    used = [(item, name) for item, name in text.SECONDS.items() if item in spent]
    table = table_html(["part of the chosen step", "seconds", "share"], text.seconds_rows(plan.chosen, _time))
    note = "The table shows the busiest rank. The others wait longer: the bubble is the idle share of all ranks."
    return card("Where a step goes", f'{bar_rows(rows)}{legend_html(used)}{table}<p class="note">{note}</p>')


def _bytes(plan: ClusterPlan) -> str:
    """Return the bytes of the best layouts, compared with what a device may hold."""
    limit = plan.limit_bytes
    rows = [_bar(choice, choice.estimate.bytes, text.BYTES, limit, size_text, choice.bytes) for choice in plan.best]
    table = table_html(["part of the fullest device", "bytes", "share"], text.bytes_rows(plan.chosen))
    note = f'<p class="note">A full bar is {size_text(limit)}, the most that a device may hold.</p>'
    return card("What a device holds", bar_rows(rows) + legend_html(text.BYTES.items()) + note + table)


def _best(explanation: Explanation) -> str:
    header = ["", "mesh", "settings", "step", "bubble", "per device", "why it loses"]
    rows = []
    for number, plan in enumerate(explanation.best, 1):
        choice = plan.choice
        took = (_time(choice.seconds), f"{choice.estimate.bubble:.1%}", size_text(choice.bytes))
        rows.append([str(number), str(choice.mesh), text.settings_text(choice), *took, plan.sentence or "chosen"])
    survey = explanation.plan.survey
    note = (
        f'<p class="note">The best layout of each mesh, out of {counted(survey.num_layouts, "layout")}; '
        f"{survey.num_evaluated} were evaluated.</p>"
    )
    title = f"The {len(rows)} best" if len(rows) > 1 else "The best"
    return card(title, table_html(header, rows, words=(1, 2, 6)) + note, wide=True)


def _changes(reasons: Reasons) -> str:
    rows = [[c.kind, _time(c.choice.seconds), size_text(c.choice.bytes), c.sentence] for c in reasons.changes]
    listed = table_html(["change", "step", "per device", "result"], rows, words=(3,))
    return card("The choice with one setting changed", listed, wide=True)


def _more(reasons: Reasons) -> str:
    items = "".join(f"<li><b class='gain'>{_gain(m.gain)}</b><span>{safe(str(m))}</span></li>" for m in reasons.margins)
    return card("What more hardware would gain", f'<ol class="remedies">{items}</ol>')


def _gain(share: float) -> str:
    return f"{share:+.1%}" if abs(share) >= 5e-4 else "0%"


def _ranks(plan: ClusterPlan) -> str:
    """Return the placement of ranks: which axis crosses which links, and the first nodes device by device."""
    layout = plan.chosen.layout
    order = "Ranks count " + ", then ".join(f"{axis} ({getattr(layout, axis)})" for axis in AXES)
    crossed = "; ".join(f"{axis} communicates {where}" for axis, where in links(layout, plan.cluster).items())
    sentences = ["Each device has its rank in bold", order, *([crossed[:1].upper() + crossed[1:]] if crossed else [])]
    note = f"<p>{safe('. '.join(sentences))}.</p>"
    axes = {"pipeline": "p", "data": "d", "context": "c", "tensor": "t"}
    shown = [axis for axis in axes if getattr(layout, axis) > 1]
    nodes: dict[int, list[str]] = {}
    for rank, place in first_places(layout, plan.cluster).items():
        words = " ".join(f"{axes[axis]}{getattr(place, axis)}" for axis in shown) or "all"
        nodes.setdefault(place.node, []).append(f"<td><b>{rank}</b> {safe(words)}</td>")
    lines = "".join(f"<tr><td>node {node}</td>{''.join(cells)}</tr>" for node, cells in nodes.items())
    return card("Placement of ranks", f'{note}<div class="scroll"><table class="ranks">{lines}</table></div>')


def _launch(launch: Launch) -> str:
    parts = []
    for config in launch.configs:
        missing = "".join(f"<li>{safe(name)}</li>" for name in config.missing)
        said = f"<p class='note'>The file cannot express:</p><ul>{missing}</ul>" if missing and config.starts else ""
        start = f"<pre>{safe(config.command)}</pre>"
        if not config.starts:
            lines = text.not_started(config, alone=len(launch.configs) == 1)
            start = "".join(f"<p class='note'>{safe(line)}</p>" for line in lines)
        parts.append(
            f"<h3>{safe(config.framework)}</h3>{start}{said}"
            f"<details><summary>{safe(config.file)}</summary><pre>{safe(config.text)}</pre></details>"
        )
    return card("How to start it", "".join(parts), wide=True)


def _bar(
    choice: Choice, items: object, names: Mapping[str, str], whole: float, written: Callable[[float], str], total: float
) -> str:
    """Return a row: a layout's mesh, its items as a stacked bar, and their total."""
    sizes = {item: getattr(items, item) for item in names}
    parts = [BarPart(item, size, f"{names[item]} {written(size)}") for item, size in sizes.items() if size > 0]
    return bar_row(str(choice.mesh), parts, whole, written(total))


def best_svg(plan: ClusterPlan) -> str:
    """Return the best layout of each mesh as stacked bars of seconds."""
    took = [{name: getattr(rival.estimate.seconds, item) for item, name in text.SECONDS.items()} for rival in plan.best]
    rows = [Bar(str(rival.mesh), parts, duration(rival.seconds)) for rival, parts in zip(plan.best, took, strict=True)]
    hues = {text.SECONDS[item]: hue for item, hue in HUES.items()}
    title = f"{plan.transformer.name} on {plan.cluster.num_devices} x {plan.cluster.device.name}"
    return bars(rows, hues, title=title, x_label="seconds per step, best layout of each mesh", width=900)


def pareto_chart(plan: ClusterPlan, reasons: Reasons, *, width: int = 520) -> str:
    """Plot throughput against memory: the fastest layout for each memory, the choice, and the limit."""
    return _pareto(plan, reasons).svg(width=width)


def _pareto(plan: ClusterPlan, reasons: Reasons) -> Graph:

    def point(choice: Choice) -> tuple[float, float]:
        return choice.bytes / _GIB, plan.tokens_per_second(choice) / 1e3

    front, limit = [point(choice) for choice in reasons.pareto], plan.limit_bytes / _GIB
    others = [point(choice) for choice in (*plan.best[1:], *(change.choice for change in reasons.changes))]
    most = 1.05 * max(x for x, _ in front)
    shown = [other for other in others if other[0] <= most]
    series = [
        Series("fastest layout with this much memory", front),
        Series("limit of a device", [(limit, 0.0), (limit, max(y for _, y in front))], dashed=True),
    ]
    if shown:
        series.append(Series("other meshes, and the choice with one setting changed", shown, marks=True))
    series.append(Series("chosen", [point(plan.chosen)], marks=True))
    words = ("Throughput against memory", "GiB held by the fullest device", "thousand tokens per second")
    return Graph(series, *words, x_from=0.0)


def scaling_chart(reasons: Reasons, *, width: int = 520) -> str:
    """Plot strong and weak scaling: throughput per device, relative to the smallest cluster."""
    return _scaling(reasons).svg(width=width)


def _scaling(reasons: Reasons) -> Graph:
    series = []
    for name, words in (("strong", "strong: the same batch"), ("weak", "weak: the batch grows with the devices")):
        points = [(float(dot.devices), dot.efficiency) for dot in reasons.scaling[name] if dot.efficiency is not None]
        if points:
            series.append(Series(words, points))
    relative = "throughput per device, relative to the smallest cluster that fits"
    return Graph(series, "Scaling", "devices", relative, log_x=True)
