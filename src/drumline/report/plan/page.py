"""A cluster plan as one offline page: the choice, where its seconds and bytes go, why others lose, how to start it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drumline.core.errors import counted
from drumline.plan.launch.launch import AXES, Launch, first_places, links
from drumline.plan.layouts.explain import Explanation, Reasons
from drumline.plan.layouts.planner import ClusterPlan
from drumline.plan.layouts.survey import Choice
from drumline.report.draw.html import asset, page_with
from drumline.report.draw.markup import Part, bar, legend, safe
from drumline.report.draw.scene import document
from drumline.report.plan.charts import pareto_chart, scaling_chart
from drumline.report.plan.text import (
    BYTES,
    SCALING,
    SECONDS,
    VOLUMES,
    bytes_rows,
    headline,
    not_started,
    scaling_rows,
    seconds_rows,
    settings_text,
    traffic_rows,
)
from drumline.report.units import duration, size_text

_STRIPS = 8  # ranks up to which memory and queues are shown from the beginning


def plan_page(told: Explanation, reasons: Reasons) -> str:
    """Return the page of a plan with its reasons."""
    title, *choice = headline(told.plan)
    drawn = reasons.drawing
    data = document(
        [] if drawn is None else [drawn.timeline],
        title=title,
        advice=". ".join(choice) + ".",
        names=None if drawn is None else [drawn.shows],
        seconds=True,
    )
    data["strips"] = drawn is not None and drawn.timeline.num_ranks <= _STRIPS  # the toolbar shows and hides them
    style = asset("report.css") + asset("plan.css")
    if drawn is None:
        style += ".toolbar, #overview, .legend, footer { display: none; }"
    return page_with(data, panel=_above(told), below=_below(told, reasons), style=style, extra=told.to_json())


def _above(told: Explanation) -> str:
    pair = f'<div class="pair">{_seconds(told.plan)}{_bytes(told.plan)}</div>'
    return f'<section class="report plan">{_cards(told)}{pair}</section>'


def _below(told: Explanation, reasons: Reasons) -> str:
    plan = told.plan
    cards = [_best(told), _changes(reasons), _more(reasons), _traffic(plan, reasons)]
    pictures = [
        f'<div class="card">{pareto_chart(plan, reasons)}</div>',
        f'<div class="card">{scaling_chart(reasons)}</div>',
    ]
    rest = [_ranks(plan), _scaling(plan, reasons), _launch(told.launch)]
    return f'<section class="report plan"><div class="pair">{"".join([*cards, *pictures, *rest])}</div></section>'


def _cards(told: Explanation) -> str:
    plan, chosen = told.plan, told.plan.chosen
    cards = [
        ("layout", str(chosen.mesh), settings_text(chosen)),
        ("a step", duration(chosen.seconds), f"{plan.batch} sequences"),
        ("throughput", f"{plan.tokens_per_second(chosen):,.0f}", "tokens/s"),
        (
            "a GPU",
            f"{chosen.estimate.flops_per_second / 1e12:.0f} TFLOP/s",
            f"{plan.utilisation(chosen):.1%} of its peak",
        ),
        ("bubble", f"{chosen.estimate.bubble:.1%}", "of the pipeline's makespan"),
        ("memory", size_text(chosen.bytes), f"of {size_text(plan.limit_bytes)}, {plan.headroom:.0%} headroom"),
    ]
    items = (
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd><dd class='note'>{safe(note)}</dd></div>"
        for name, value, note in cards
    )
    objective = f'<p class="note">The objective: {safe(told.objective)}.</p>'
    return f'<dl class="cards">{"".join(items)}</dl>{objective}'


def _seconds(plan: ClusterPlan) -> str:
    """Return the seconds of the best layouts, each as a stacked bar."""
    longest = max(one.seconds for one in plan.best)
    rows = []
    for one in plan.best:
        took = {item: getattr(one.estimate.seconds, item) for item in SECONDS}
        parts = [Part(item, took[item], f"{name} {duration(took[item])}") for item, name in SECONDS.items()]
        rows.append(_bar(one, parts, longest, duration(one.seconds)))
    used = [
        (item, name)
        for item, name in SECONDS.items()
        if any(getattr(one.estimate.seconds, item) > 0 for one in plan.best)
    ]
    table = _table(["of the chosen step", "seconds", "share"], seconds_rows(plan.chosen))
    return _card("Where a step goes", "".join(rows) + legend(used) + table)


def _bytes(plan: ClusterPlan) -> str:
    """Return the bytes of the best layouts, against what a device may hold."""
    limit = plan.limit_bytes
    rows = []
    for one in plan.best:
        held = {item: getattr(one.estimate.bytes, item) for item in BYTES}
        parts = [Part(item, held[item], f"{name} {size_text(held[item])}") for item, name in BYTES.items()]
        rows.append(_bar(one, parts, limit, size_text(one.bytes)))
    table = _table(["of the fullest device", "bytes", "share"], bytes_rows(plan.chosen))
    note = f'<p class="note">A whole bar is {size_text(limit)}, what a device may hold.</p>'
    return _card("What a device holds", "".join(rows) + legend(BYTES.items()) + note + table)


def _best(told: Explanation) -> str:
    header = ["", "mesh", "settings", "a step", "bubble", "a device", "why it loses"]
    rows = [
        [
            str(number),
            str(one.choice.mesh),
            settings_text(one.choice),
            duration(one.choice.seconds),
            f"{one.choice.estimate.bubble:.1%}",
            size_text(one.choice.bytes),
            one.why or "chosen",
        ]
        for number, one in enumerate(told.best, 1)
    ]
    survey = told.plan.survey
    note = (
        f'<p class="note">The best layout of each mesh, out of {counted(survey.num_layouts, "layout")}; '
        f"{survey.num_evaluated} had to be looked at.</p>"
    )
    return _wide(f"The {len(rows)} best" if len(rows) > 1 else "The best", _table(header, rows, words=(1, 2, 6)) + note)


def _changes(reasons: Reasons) -> str:
    rows = [[one.what, duration(one.choice.seconds), size_text(one.choice.bytes), one.why] for one in reasons.changes]
    return _wide(
        "The choice with one setting changed", _table(["change", "a step", "a device", "result"], rows, words=(3,))
    )


def _more(reasons: Reasons) -> str:
    items = "".join(
        f"<li><b class='gain'>{one.gain:+.1%}</b><span>{safe(str(one))}</span></li>" for one in reasons.margins
    )
    return _card("What more would buy", f'<ol class="remedies">{items}</ol>')


def _traffic(plan: ClusterPlan, reasons: Reasons) -> str:
    header = ["", "mesh", *VOLUMES, "a step", "fits"]
    return _card("Bytes a device sends in a step", _table(header, traffic_rows(plan, reasons)))


def _scaling(plan: ClusterPlan, reasons: Reasons) -> str:
    return _card("Strong and weak scaling", _table(SCALING, scaling_rows(plan, reasons)))


def _ranks(plan: ClusterPlan) -> str:
    """Return where ranks lie: which axis crosses which links, and the first nodes device by device."""
    layout = plan.chosen.layout
    order = "Ranks count " + ", then ".join(f"{axis} ({getattr(layout, axis)})" for axis in AXES)
    crossed = "; ".join(f"{axis} talks {where}" for axis, where in links(layout, plan.cluster).items())
    note = f"<p>{safe(order)}. {safe(crossed[:1].upper() + crossed[1:])}{'.' if crossed else ''}</p>"
    axes = {"pipeline": "p", "data": "d", "context": "c", "tensor": "t"}
    shown = [axis for axis in axes if getattr(layout, axis) > 1]
    nodes: dict[int, list[str]] = {}
    for rank, place in first_places(layout, plan.cluster).items():
        words = " ".join(f"{axes[axis]}{getattr(place, axis)}" for axis in shown) or "all"
        nodes.setdefault(place.node, []).append(f'<td title="rank {rank}">{safe(words)}</td>')
    lines = "".join(f"<tr><td>node {node}</td>{''.join(cells)}</tr>" for node, cells in nodes.items())
    return _card("Where ranks lie", f'{note}<div class="scroll"><table class="ranks">{lines}</table></div>')


def _launch(launch: Launch) -> str:
    parts = []
    for config in launch.configs:
        missing = "".join(f"<li>{safe(one)}</li>" for one in config.missing)
        said = f"<p class='note'>It cannot be told:</p><ul>{missing}</ul>" if missing else ""
        start = f"<pre>{safe(config.command)}</pre>"
        if not config.starts:
            start = "".join(f"<p class='note'>{safe(one)}</p>" for one in not_started(config))
        parts.append(
            f"<h3>{safe(config.framework)}</h3>{start}{said}"
            f"<details><summary>{safe(config.file)}</summary><pre>{safe(config.text)}</pre></details>"
        )
    return _wide("How to start it", "".join(parts))


def _bar(choice: Choice, parts: Sequence[Part], longest: float, value: str) -> str:
    """Return a row: a layout's mesh, its parts as a stacked bar, and what they are together."""
    said = f"{choice.mesh}: {', '.join(part.title for part in parts if part.size > 0)}"
    picture = bar(parts, longest, said=said)
    return (
        f'<div class="row"><span>{safe(str(choice.mesh))}</span>{picture}<span class="value">{safe(value)}</span></div>'
    )


def _card(title: str, body: str) -> str:
    return f'<div class="card"><h3>{safe(title)}</h3>{body}</div>'


def _wide(title: str, body: str) -> str:
    return f'<div class="card wide"><h3>{safe(title)}</h3>{body}</div>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = ()) -> str:
    left = [' class="words"' if at in words else "" for at in range(len(header))]
    head = "".join(f'<th scope="col"{kind}>{safe(name)}</th>' for name, kind in zip(header, left, strict=True))
    lines = "".join(
        f"<tr>{''.join(f'<td{kind}>{safe(cell)}</td>' for cell, kind in zip(row, left, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
