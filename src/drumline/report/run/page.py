"""Reports as one offline page: what to change, measured over simulated timelines, and where the time went.

What stands around the timelines is made from the figures that --json prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from drumline.core.errors import counted
from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.html import asset, page_with
from drumline.report.draw.markup import Curve, Part, bar, curves, legend, safe
from drumline.report.draw.palette import run_class
from drumline.report.draw.scene import document
from drumline.report.run.follow import PARTS
from drumline.report.run.report import RunReport
from drumline.report.run.text import held
from drumline.report.units import counts, duration, percent, size_text

Figures = dict[str, Any]


def run_page(reports: Sequence[RunReport]) -> str:
    """Return the page of one run, or of several side by side."""
    timelines: list[Timeline] = []
    names = []
    for one in reports:
        prefix = f"{one.name}: " if len(reports) > 1 else ""
        timelines += [one.seen.measured, one.seen.simulated]
        names += [f"{prefix}measured, step {one.seen.step}", f"{prefix}simulated, same seconds of every action"]
    data = document(timelines, title=_title(reports), advice=_advice(reports), names=names, seconds=True)
    data["strips"] = len(reports) == 1  # memory and queues, which the toolbar shows and hides
    figures = [one.figures() for one in reports]
    return page_with(data, panel=_above(figures), below=_below(figures), style=asset("report.css"))


def _title(reports: Sequence[RunReport]) -> str:
    if len(reports) > 1:
        return f"{len(reports)} runs side by side"
    program = reports[0].run.program
    return f"{reports[0].name}: {program.name}, {counts(program)}"


def _advice(reports: Sequence[RunReport]) -> str:
    if len(reports) == 1:
        return reports[0].advice.sentence
    fastest, *others = sorted(reports, key=lambda one: one.seen.measured.makespan)
    best, next_best = fastest.seen.measured.makespan, others[0].seen.measured.makespan
    less = 1 - best / next_best if next_best > 0 else 0.0
    return f"{fastest.name} has the shortest step: {duration(best)}, {less:.0%} less than {others[0].name}."


def _above(runs: Sequence[Figures]) -> str:
    """Return what comes before the timelines: the main figures and what to do, or a comparison of several runs."""
    if len(runs) > 1:
        return f'<section class="report">{_comparison(runs)}</section>'
    return f'<section class="report">{_cards(runs[0])}{_remedies(runs[0])}</section>'


def _below(runs: Sequence[Figures]) -> str:
    """Return what comes behind the timelines: steps of all runs, then for each where the time went."""
    parts = [_steps(runs)]
    for run in runs:
        title = f"<h2 class='run'>{safe(run['name'])}</h2>" if len(runs) > 1 else ""
        advice = _remedies(run) if len(runs) > 1 else ""
        cards = _ranks(run) + _causes(run) + _stages(run) + _held(run)
        parts.append(f'<section class="report">{title}{advice}<div class="pair">{cards}</div></section>')
    return "".join(parts)


def _cards(run: Figures) -> str:
    slowest = run["per_stage"][run["slowest_stage"]]
    cards = [
        ("makespan", _time(run["makespan"]), f"step {run['step']} of {run['num_steps']}"),
        ("bubble", percent(run["bubble"]), f"utilisation {percent(run['utilisation'])}"),
        ("overhead and jitter", percent(run["overhead_share"]), f"simulated {_time(run['simulated_makespan'])}"),
        ("slowest stage", str(slowest["stage"]), f"{_time(slowest['seconds'])} a microbatch"),
        ("peak stash", _fullest(run), "on the fullest rank"),
    ]
    rate = _throughput(run)
    if rate is not None:
        cards.append(rate)
    items = (
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd><dd class='note'>{safe(note)}</dd></div>"
        for name, value, note in cards
    )
    return f'<dl class="cards">{"".join(items)}</dl>'


def _throughput(run: Figures) -> tuple[str, str, str] | None:
    for key, unit in (("tokens_per_second", "tokens/s a rank"), ("rows_per_second", "rows/s")):
        if run[key] is not None:
            return "throughput", f"{run[key]:,.4g}", unit
    return None


def _remedies(run: Figures) -> str:
    items = []
    for one in run["advice"]["remedies"]:
        gain = f'<b class="gain">{-one["gain"]:+.0%}</b>' if one["gain"] > 0 else '<b class="gain none"></b>'
        note = f' <span class="note">{safe(one["assumes"])}</span>' if one["assumes"] else ""
        items.append(f"<li>{gain}<span>{safe(one['sentence'])}{note}</span></li>")
    listed = f'<ol class="remedies">{"".join(items)}</ol>' if items else f"<p>{safe(run['advice']['sentence'])}</p>"
    return f'<div class="card wide"><h3>What to change</h3>{listed}</div>'


def _comparison(runs: Sequence[Figures]) -> str:
    columns: list[tuple[str, Callable[[Figures], float], Callable[[float], str]]] = [
        ("makespan", lambda run: run["makespan"], _time),
        ("simulated", lambda run: run["simulated_makespan"], _time),
        ("bubble", lambda run: run["bubble"], percent),
        ("overhead and jitter", lambda run: run["overhead_share"], percent),
        ("slowest stage", lambda run: max(one["seconds"] for one in run["per_stage"]), _time),
    ]
    least = [min(value(run) for run in runs) for _, value, _ in columns]
    rows = []
    for number, run in enumerate(runs):
        cells = [
            f"<td{' class=best' if value(run) == least[at] else ''}>{safe(shown(value(run)))}</td>"
            for at, (_, value, shown) in enumerate(columns)
        ]
        swatch = f'<svg class="swatch"><rect class="part {run_class(number)}"/></svg>'
        plain = (run["schedule"], run["ranks"], run["microbatches"], _fullest(run), run["num_steps"])
        cells += [f"<td>{safe(one)}</td>" for one in plain]
        rows.append(f"<tr><td>{swatch} {safe(run['name'])}</td>{''.join(cells)}</tr>")
    names = ["run", *(name for name, _, _ in columns), "schedule", "ranks", "microbatches", "peak stash", "steps"]
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _ranks(run: Figures) -> str:
    """Return every rank's step by what it did, as bars and as a table."""
    longest = max(one["step_seconds"] for one in run["per_rank"])
    bars, rows = [], []
    for one in run["per_rank"]:
        parts = [Part(part, one[part], f"{part} {_time(one[part])}") for part in PARTS]
        said = f"rank {one['rank']}: {', '.join(part.title for part in parts)}"
        bars.append(_row(f"rank {one['rank']}", bar(parts, longest, said=said), _time(one["step_seconds"])))
        cells = [_time(one[part]) for part in PARTS]
        rows.append([str(one["rank"]), *cells, percent(one["idle_share"])])
    keys = legend((part, part) for part in PARTS)
    table = _table(["rank", *PARTS, "idle"], rows)
    return _card("Where each rank's step went", f"{''.join(bars)}{keys}{table}")


def _causes(run: Figures) -> str:
    """Return idle time by cause, measured over simulated."""
    whole = max(run["makespan"], run["simulated_makespan"])
    causes = list(dict.fromkeys([*run["measured"]["idle_by_cause"], *run["simulated"]["idle_by_cause"]]))
    bars = []
    for rank in range(run["ranks"]):
        shares = run["per_rank"][rank]
        for which, name, share in (
            ("measured", f"rank {rank}", shares["idle_share"]),
            ("simulated", "", shares["simulated_idle_share"]),
        ):
            found = run[which]["idle_by_cause"]
            parts = [
                Part(cause, found[cause][rank], f"{which} {cause} {_time(found[cause][rank])}")
                for cause in causes
                if cause in found
            ]
            kind = "thin" if which == "simulated" else ""
            said = f"rank {rank}, {which}: idle {percent(share)}"
            bars.append(_row(name, bar(parts, whole, said=said), percent(share), kind))
    note = '<p class="note">Thick: measured. Thin: simulated with the same seconds of every action.</p>'
    return _card("Bubble by cause", f"{''.join(bars)}{legend((cause, cause) for cause in causes)}{note}")


def _stages(run: Figures) -> str:
    """Return the seconds of a microbatch in every stage, the slowest marked."""
    slowest = max(one["seconds"] for one in run["per_stage"])
    bars = []
    for one in run["per_stage"]:
        parts = [Part(op, one[op], f"{op} {_time(one[op])}") for op in ("forward", "backward")]
        name = f"stage {one['stage']}"
        said = f"{name}: {', '.join(part.title for part in parts)}"
        kind = "slowest" if one["stage"] == run["slowest_stage"] else ""
        bars.append(_row(name, bar(parts, slowest, said=said), _time(one["seconds"]), kind))
        if one["blocks"]:
            ranks = " and ".join(map(str, one["ranks"]))
            bars.append(f'<p class="note under">{safe(_blocks(one["blocks"]))}, rank {ranks}</p>')
    keys = legend((op, op) for op in ("forward", "backward"))
    return _card("Seconds of a microbatch by stage", f"{''.join(bars)}{keys}")


def _held(run: Figures) -> str:
    """Return peaks: what each rank stashed, and how many messages waited on each edge."""
    weighed = all(one["peak_stash_bytes"] is not None for one in run["per_rank"])
    key, written = ("peak_stash_bytes", size_text) if weighed else ("peak_pairs", _pairs)
    stashes = {f"rank {one['rank']}": one[key] for one in run["per_rank"]}
    queues = {edge.replace("->", " → "): depth for edge, depth in run["measured"]["peak_queue"].items()}
    waiting = f"<h3>Most messages waiting</h3>{_peaks('queue', queues, str)}" if queues else ""
    return _card("Peak stash", _peaks("stash", stashes, written) + waiting)


def _peaks(kind: str, peaks: Mapping[str, float], written: Callable[[Any], str]) -> str:
    most = max(peaks.values())
    return "".join(
        _row(name, bar([Part(kind, peak, written(peak))], most, said=f"{name}: {written(peak)}"), written(peak))
        for name, peak in peaks.items()
    )


def _pairs(number: int) -> str:
    return counted(number, "pair")


def _steps(runs: Sequence[Figures]) -> str:
    """Return curves over steps: what was learned, and how fast."""
    wanted: list[tuple[str, str, Callable[[float], str], bool]] = [
        ("loss", "loss", lambda value: f"{value:.4g}", False),
        ("seconds", "seconds from step to step", _time, True),
        ("utilisation", "utilisation", percent, True),
        ("tokens_per_second", "tokens per second and rank", lambda value: f"{value:,.4g}", True),
        ("rows_per_second", "rows per second", lambda value: f"{value:,.4g}", True),
    ]
    figures = []
    for key, name, written, from_zero in wanted:
        lines = [
            Curve(
                run_class(number),
                run["name"],
                [(one["step"], one[key]) for one in run["per_step"] if one[key] is not None],
            )
            for number, run in enumerate(runs)
        ]
        values = [value for line in lines for _, value in line.points]
        if len(values) > 1:
            high, low = max(values), 0.0 if from_zero else min(values)
            figures.append(curves(name, lines, [written(high), written(low)], low=low, high=high))
    if not figures:
        return ""
    keys = legend((run_class(number), run["name"]) for number, run in enumerate(runs)) if len(runs) > 1 else ""
    return f'<section class="report"><h2>Steps</h2>{keys}<div class="curves">{"".join(figures)}</div></section>'


def _row(name: str, picture: str, value: str, kind: str = "") -> str:
    return f'<div class="row {kind}"><span>{safe(name)}</span>{picture}<span class="value">{safe(value)}</span></div>'


def _card(title: str, body: str) -> str:
    return f'<div class="card"><h3>{safe(title)}</h3>{body}</div>'


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{safe(name)}</th>' for name in header)
    lines = "".join(f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def _blocks(names: Sequence[str]) -> str:
    return f"block {names[0]}" if len(names) == 1 else f"blocks {names[0]} to {names[-1]}"


def _fullest(run: Figures) -> str:
    return held(max(run["per_rank"], key=lambda one: (one["peak_stash_bytes"] or 0, one["peak_pairs"])))


def _time(seconds: float) -> str:
    return duration(seconds).replace(" us", " µs")
