"""A cluster plan as one offline page: the choice, where its seconds and bytes go, why others lose, how to start it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from drumline.core.errors import counted
from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.html import asset, page_with
from drumline.report.draw.markup import Part, bar, legend, safe
from drumline.report.draw.scene import document
from drumline.report.plan.charts import pareto_chart, scaling_chart
from drumline.report.plan.text import (
    BYTES,
    SCALING,
    SECONDS,
    VOLUMES,
    headline,
    not_started,
    scaling_rows,
    settings_text,
    traffic_rows,
)
from drumline.report.units import duration, size_text

Figures = Mapping[str, Any]

_STRIPS = 8  # ranks up to which memory and queues are shown from the beginning


def plan_page(figures: Figures, timeline: Timeline | None = None, *, drawn: str = "") -> str:
    """Return the page; `timeline` is the chosen pipeline, and `drawn` says what of it is shown."""
    title, *choice = headline(figures)
    data = document(
        [] if timeline is None else [timeline],
        title=title,
        advice=". ".join(choice) + ".",
        names=None if timeline is None else [drawn],
        seconds=True,
    )
    data["strips"] = timeline is not None and timeline.num_ranks <= _STRIPS  # the toolbar shows and hides them
    style = asset("report.css") + asset("plan.css")
    if timeline is None:
        style += ".toolbar, #overview, .legend, footer { display: none; }"
    return page_with(data, panel=_above(figures), below=_below(figures), style=style, extra=figures)


def _above(figures: Figures) -> str:
    pair = f'<div class="pair">{_seconds(figures)}{_bytes(figures)}</div>'
    return f'<section class="report plan">{_cards(figures)}{pair}</section>'


def _below(figures: Figures) -> str:
    cards = [_best(figures), _changes(figures), _more(figures), _traffic(figures)]
    pictures = [
        f'<div class="card">{pareto_chart(figures)}</div>',
        f'<div class="card">{scaling_chart(figures)}</div>',
    ]
    rest = [_ranks(figures), _scaling(figures), _launch(figures)]
    return f'<section class="report plan"><div class="pair">{"".join([*cards, *pictures, *rest])}</div></section>'


def _cards(figures: Figures) -> str:
    chosen = figures["chosen"]
    cards = [
        ("layout", chosen["mesh"], settings_text(chosen)),
        ("a step", duration(chosen["step_seconds"]), f"{figures['batch']} sequences"),
        ("throughput", f"{chosen['tokens_per_second']:,.0f}", "tokens/s"),
        (
            "a GPU",
            f"{chosen['flops_per_second_per_device'] / 1e12:.0f} TFLOP/s",
            f"{chosen['utilisation']:.1%} of its peak",
        ),
        ("bubble", f"{chosen['bubble']:.1%}", "of the pipeline's makespan"),
        (
            "memory",
            size_text(chosen["peak_bytes"]),
            f"of {size_text(figures['limit_bytes'])}, {figures['headroom']:.0%} headroom",
        ),
    ]
    items = (
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd><dd class='note'>{safe(note)}</dd></div>"
        for name, value, note in cards
    )
    objective = f'<p class="note">The objective: {safe(figures["objective"])}.</p>'
    return f'<dl class="cards">{"".join(items)}</dl>{objective}'


def _seconds(figures: Figures) -> str:
    """Return the seconds of the best layouts, each as a stacked bar."""
    longest = max(one["step_seconds"] for one in figures["best"])
    rows = []
    for one in figures["best"]:
        parts = [
            Part(item, one["seconds"][item], f"{name} {duration(one['seconds'][item])}")
            for item, name in SECONDS.items()
        ]
        said = f"{one['mesh']}: {', '.join(part.title for part in parts if part.size > 0)}"
        rows.append(_row(one["mesh"], bar(parts, longest, said=said), duration(one["step_seconds"])))
    used = [(item, name) for item, name in SECONDS.items() if any(one["seconds"][item] > 0 for one in figures["best"])]
    chosen = figures["chosen"]
    table = _table(
        ["of the chosen step", "seconds", "share"],
        [
            [name, duration(chosen["seconds"][item]), f"{chosen['seconds'][item] / chosen['step_seconds']:.1%}"]
            for item, name in used
            if chosen["seconds"][item] > 0
        ],
    )
    return _card("Where a step goes", "".join(rows) + legend(used) + table)


def _bytes(figures: Figures) -> str:
    """Return the bytes of the best layouts, against what a device may hold."""
    limit = figures["limit_bytes"]
    rows = []
    for one in figures["best"]:
        parts = [
            Part(item, one["bytes"][item], f"{name} {size_text(one['bytes'][item])}") for item, name in BYTES.items()
        ]
        said = f"{one['mesh']}: {', '.join(part.title for part in parts if part.size > 0)}"
        rows.append(_row(one["mesh"], bar(parts, limit, said=said), size_text(one["peak_bytes"])))
    chosen = figures["chosen"]
    table = _table(
        ["of the fullest device", "bytes", "share"],
        [
            [name, size_text(chosen["bytes"][item]), f"{chosen['bytes'][item] / chosen['peak_bytes']:.1%}"]
            for item, name in BYTES.items()
        ],
    )
    note = f'<p class="note">A whole bar is {size_text(limit)}, what a device may hold.</p>'
    return _card("What a device holds", "".join(rows) + legend(BYTES.items()) + note + table)


def _best(figures: Figures) -> str:
    header = ["", "mesh", "settings", "a step", "bubble", "a device", "why it loses"]
    rows = [
        [
            str(number),
            one["mesh"],
            settings_text(one),
            duration(one["step_seconds"]),
            f"{one['bubble']:.1%}",
            size_text(one["peak_bytes"]),
            one["why"] or "chosen",
        ]
        for number, one in enumerate(figures["best"], 1)
    ]
    note = (
        f'<p class="note">The best layout of each mesh, out of {counted(figures["num_layouts"], "layout")}; '
        f"{figures['num_evaluated']} had to be looked at.</p>"
    )
    return _wide(f"The {len(rows)} best" if len(rows) > 1 else "The best", _table(header, rows, words=(1, 2, 6)) + note)


def _changes(figures: Figures) -> str:
    rows = [
        [one["what"], duration(one["step_seconds"]), size_text(one["peak_bytes"]), one["why"]]
        for one in figures["changes"]
    ]
    return _wide(
        "The choice with one setting changed", _table(["change", "a step", "a device", "result"], rows, words=(3,))
    )


def _more(figures: Figures) -> str:
    items = "".join(
        f"<li><b class='gain'>{one['gain']:+.1%}</b><span>{safe(one['sentence'])}</span></li>"
        for one in figures["more"]
    )
    return _card("What more would buy", f'<ol class="remedies">{items}</ol>')


def _traffic(figures: Figures) -> str:
    header = ["", "mesh", *VOLUMES, "a step", "fits"]
    return _card("Bytes a device sends in a step", _table(header, traffic_rows(figures)))


def _scaling(figures: Figures) -> str:
    return _card("Strong and weak scaling", _table(SCALING, scaling_rows(figures)))


def _ranks(figures: Figures) -> str:
    """Return where ranks lie: which axis crosses which links, and the first nodes device by device."""
    ranks = figures["ranks"]
    order = "Ranks count " + ", then ".join(f"{axis} ({ranks['sizes'][axis]})" for axis in ranks["order"])
    crossed = "; ".join(f"{axis} talks {where}" for axis, where in ranks["links"].items())
    note = f"<p>{safe(order)}. {safe(crossed[:1].upper() + crossed[1:])}{'.' if crossed else ''}</p>"
    axes = {"pipeline": "p", "data": "d", "context": "c", "tensor": "t"}
    shown = [axis for axis in axes if ranks["sizes"][axis] > 1]
    nodes: dict[int, list[str]] = {}
    for one in ranks["shown"]:
        words = " ".join(f"{axes[axis]}{one[axis]}" for axis in shown) or "all"
        nodes.setdefault(one["node"], []).append(f'<td title="rank {one["rank"]}">{safe(words)}</td>')
    lines = "".join(f"<tr><td>node {node}</td>{''.join(cells)}</tr>" for node, cells in nodes.items())
    return _card("Where ranks lie", f'{note}<div class="scroll"><table class="ranks">{lines}</table></div>')


def _launch(figures: Figures) -> str:
    parts = []
    for name, config in figures["launch"].items():
        missing = "".join(f"<li>{safe(one)}</li>" for one in config["missing"])
        said = f"<p class='note'>It cannot be told:</p><ul>{missing}</ul>" if missing else ""
        start = f"<pre>{safe(config['command'])}</pre>"
        if not config["starts"]:
            start = "".join(f"<p class='note'>{safe(one)}</p>" for one in not_started(config))
        parts.append(
            f"<h3>{safe(name)}</h3>{start}{said}"
            f"<details><summary>{safe(config['file'])}</summary><pre>{safe(config['text'])}</pre></details>"
        )
    return _wide("How to start it", "".join(parts))


def _row(name: str, picture: str, value: str) -> str:
    return f'<div class="row"><span>{safe(name)}</span>{picture}<span class="value">{safe(value)}</span></div>'


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
