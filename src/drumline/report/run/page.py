"""Reports as one offline page: what to change, measured and simulated timelines, and where the time went.

Everything around the timelines comes from the figures that --json prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from drumline.core.errors import counted
from drumline.core.timeline.timeline import Timeline
from drumline.core.units import duration, number, percent, size_text
from drumline.report.draw.html import asset, page_with
from drumline.report.draw.markup import (
    BarPart,
    PlotLine,
    bar_row,
    bar_rows,
    card,
    cards,
    curves,
    legend_html,
    run_legend,
    run_sign,
    safe,
    table_html,
)
from drumline.report.draw.palette import run_class
from drumline.report.draw.scene import document
from drumline.report.run.changes import HEADER, cells
from drumline.report.run.follow import PARTS
from drumline.report.run.report import RunReport
from drumline.report.run.text import fullest
from drumline.report.summary import counts

Figures = dict[str, Any]
# Shorter by less than this share, or than steps of one run differ from each other, is about the same.
_TOLD_APART = 0.01
_LISTED = 3


def run_page(reports: Sequence[RunReport], *, title: str = "", opening: str = "") -> str:
    """Return the page of one run, or of several side by side; `opening` is markup to begin with."""
    timelines: list[Timeline] = []
    names = []
    for report in reports:
        prefix = f"{report.name}: " if len(reports) > 1 else ""
        timelines += [report.step.measured, report.step.simulated]
        names += [f"{prefix}measured, step {report.step.step}", f"{prefix}simulated, same seconds of every action"]
    data = document(timelines, title=title or _title(reports), advice=_advice(reports), names=names, seconds=True)
    data["strips"] = len(reports) == 1  # memory and queues, which the toolbar shows and hides
    if len(reports) > 1:
        for at, timeline in enumerate(data["timelines"]):
            timeline["run"] = {"name": reports[at // 2].name, "kind": run_class(at // 2)}
    figures = [report.figures() for report in reports]
    above = _contents(figures) + opening + _above(figures)
    return page_with(data, panel=above, below=_below(figures), style=asset("report.css"))


def _title(reports: Sequence[RunReport]) -> str:
    if len(reports) > 1:
        used = dict.fromkeys(report.step.program.name for report in reports)
        listed = f": {', '.join(used)}" if len(used) <= _LISTED else ""
        return f"Comparison of {len(reports)} runs{listed}"
    program = reports[0].step.program
    return f"Run {reports[0].name}: {program.name}, {counts(program)}"


def _advice(reports: Sequence[RunReport]) -> str:
    if len(reports) == 1:
        return reports[0].advice.sentence
    busy = [report for report in reports if report.steadiness.busy]
    if busy:
        return f"{busy[0].name}: {busy[0].steadiness.sentence} Times of these runs cannot be compared."
    fastest, *others = sorted(reports, key=_makespan)
    best, least = _makespan(fastest), max(_TOLD_APART, *(report.steadiness.spread or 0.0 for report in reports))
    near = [other for other in others if _makespan(other) <= (1 + least) * best]
    if not near:
        less = 1 - best / _makespan(others[0])
        return f"{fastest.name} has the shortest step: {duration(best)}, {less:.0%} less than {others[0].name}."
    named = [report.name for report in (fastest, *near)]
    listed = f"{', '.join(named[:-1])} and {named[-1]}" if len(near) <= _LISTED else f"{len(named)} runs"
    return (
        f"{listed} take about the same time for a step: {duration(best)} to {duration(_makespan(near[-1]))}."
        f" Differences below {least:.0%} may be chance here."
    )


def _makespan(report: RunReport) -> float:
    return report.step.measured.makespan


def _above(runs: Sequence[Figures]) -> str:
    """Return what comes before the timelines: the main figures and what to do, or a comparison of several runs."""
    if len(runs) > 1:
        return f'<section class="report">{_comparison(runs)}</section>'
    # If there is nothing to change, the sentence at the top has said why.
    remedies = _remedies(runs[0]) if runs[0]["advice"]["remedies"] else ""
    return f'<section class="report">{_cards(runs[0])}{remedies}</section>'


def _contents(runs: Sequence[Figures]) -> str:
    """Return links to the sections of a page with several runs; empty for one run."""
    if len(runs) == 1:
        return ""
    links = [("title", "Overview", ""), ("charts", "Timelines", ""), ("steps", "Steps", "")]
    links += [(f"run-{order}", run["name"], run_sign(order, run["name"])) for order, run in enumerate(runs)]
    listed = "".join(f'<li><a href="#{place}">{sign}{safe(name)}</a></li>' for place, name, sign in links)
    return f'<nav class="contents" aria-label="Contents"><ol>{listed}</ol></nav>'


def _below(runs: Sequence[Figures]) -> str:
    """Return what comes after the timelines: steps of all runs, then where each run's time went.

    With several runs, the details of each are folded.
    """
    parts = [_steps(runs), *map(_changes, runs)]
    for order, run in enumerate(runs):
        details = f'<div class="pair">{_ranks(run) + _causes(run) + _stages(run) + _peaks_section(run)}</div>'
        if len(runs) > 1:
            figures = f"step {run['step']}: {_time(run['makespan'])}, bubble {percent(run['bubble'])}"
            name = f"<h2>{run_sign(order, run['name'])}{safe(run['name'])}</h2>"
            title = f'<summary>{name} <span class="note">{figures}</span></summary>'
            parts.append(f'<details class="report" id="run-{order}">{title}{_remedies(run)}{details}</details>')
        else:
            parts.append(f'<section class="report">{details}</section>')
    return "".join(parts)


def _cards(run: Figures) -> str:
    slowest = run["per_stage"][run["slowest_stage"]]
    figures = [
        ("makespan", _time(run["makespan"]), run["which_step"]),
        ("bubble", percent(run["bubble"]), _of_steps(run)),
        ("overhead and jitter", percent(run["overhead_share"]), f"simulated {_time(run['simulated_makespan'])}"),
        ("slowest stage", str(slowest["stage"]), f"{_time(slowest['seconds'])} per microbatch"),
        ("peak stash", fullest(run["per_rank"]), "on the fullest rank"),
    ]
    rates = {"tokens_per_second": "tokens/s per rank", "rows_per_second": "rows/s"}
    known = [("throughput", number(run[key], 4), unit) for key, unit in rates.items() if run[key] is not None]
    return cards([*figures, *known[:1]])


def _of_steps(run: Figures) -> str:
    """Return which bubble a card shows, and the median beside it."""
    several = run["num_steps"] > 1 and run["median_bubble"] is not None
    return f"of this step; median of all steps {percent(run['median_bubble'])}" if several else "of this step"


def _remedies(run: Figures) -> str:
    items = []
    for remedy in run["advice"]["remedies"]:
        gain = f'<b class="gain">{-remedy["gain"]:+.0%}</b>' if remedy["gain"] > 0 else '<b class="gain none"></b>'
        note = f' <span class="note">{safe(remedy["assumes"])}</span>' if remedy["assumes"] else ""
        items.append(f"<li>{gain}<span>{safe(remedy['sentence'])}{note}</span></li>")
    listed = f'<ol class="remedies">{"".join(items)}</ol>' if items else f"<p>{safe(run['advice']['sentence'])}</p>"
    return card("What to change", listed, wide=True)


def _comparison(runs: Sequence[Figures]) -> str:
    """Return a table of the runs: what they ran, the step that is shown of each, and medians over all steps."""
    columns: list[tuple[str, Callable[[Figures], float | None], Callable[[float], str]]] = [
        ("makespan", lambda run: run["makespan"], _time),
        ("simulated", lambda run: run["simulated_makespan"], _time),
        ("overhead and jitter", lambda run: run["overhead_share"], percent),
        ("slowest stage", lambda run: max(stage["seconds"] for stage in run["per_stage"]), _time),
        ("bubble, step shown", lambda run: run["bubble"], percent),
        ("median bubble, all steps", lambda run: run["median_bubble"], percent),
    ]
    values = [[value(run) for run in runs] for _, value, _ in columns]
    least = [min((share for share in column if share is not None), default=0.0) for column in values]
    several = len({run["ranks"] for run in runs}) > 1
    rows = []
    for order, run in enumerate(runs):
        cells = [
            f"<td>{run_sign(order, run['name'])}{safe(run['name'])}</td>",
            f'<td class="words">{run["schedule"]}</td>',
        ]
        cells += [f"<td>{run[key]}</td>" for key in (*(["ranks"] if several else []), "microbatches", "step")]
        for (_, _, shown), column, lowest in zip(columns, values, least, strict=True):
            figure = column[order]
            best = figure is not None and figure - lowest <= _TOLD_APART * abs(lowest)
            cells.append(f"<td{' class=best' if best else ''}>{'' if figure is None else safe(shown(figure))}</td>")
        cells += [f"<td>{safe(cell)}</td>" for cell in (fullest(run["per_rank"]), run["num_steps"])]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    names = [*(["ranks"] if several else []), "microbatches", "step shown", *(name for name, _, _ in columns)]
    head = "".join(f'<th scope="col">{name}</th>' for name in (*names, "peak stash", "steps"))
    head = f'<th scope="col">run</th><th scope="col" class="words">schedule</th>{head}'
    note = '<p class="note">Times are those of one step of each run, a typical one. The timelines below show it.</p>'
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    return f"<h2>The runs</h2>{table}{note}"


def _ranks(run: Figures) -> str:
    """Return every rank's step by what it did, as bars and as a table."""
    longest = max(rank["step_seconds"] for rank in run["per_rank"])
    bars, rows = [], []
    for rank in run["per_rank"]:
        parts = [BarPart(part, rank[part], f"{part} {_time(rank[part])}") for part in PARTS]
        bars.append(bar_row(f"rank {rank['rank']}", parts, longest, _time(rank["step_seconds"])))
        rows.append([str(rank["rank"]), *(_time(rank[part]) for part in PARTS), percent(rank["idle_share"])])
    keys = legend_html((part, part) for part in PARTS)
    table = table_html(["rank", *PARTS, "idle"], rows)
    return card("Where each rank's step went", f"{bar_rows(bars)}{keys}{table}")


def _causes(run: Figures) -> str:
    """Return idle time by cause, measured and simulated."""
    whole = max(run["makespan"], run["simulated_makespan"])
    causes = list(dict.fromkeys([*run["measured"]["idle_by_cause"], *run["simulated"]["idle_by_cause"]]))
    bars = []
    for rank in range(run["ranks"]):
        shares = run["per_rank"][rank]
        for which, name, share in (
            ("measured", f"rank {rank}", shares["idle_share"]),
            ("simulated", "", shares["simulated_idle_share"]),
        ):
            found_idle = run[which]["idle_by_cause"]
            idle = {cause: found_idle[cause][rank] for cause in causes if cause in found_idle}
            parts = [BarPart(cause, seconds, f"{cause} {_time(seconds)}") for cause, seconds in idle.items()]
            kind = "thin" if which == "simulated" else ""
            about = f"rank {rank}, {which}"
            bars.append(bar_row(name, parts, whole, percent(share), about=about, kind=kind))
    note = '<p class="note">Thick: measured. Thin: simulated with the same seconds of every action.</p>'
    return card("Bubble by cause", f"{bar_rows(bars)}{legend_html((cause, cause) for cause in causes)}{note}")


def _stages(run: Figures) -> str:
    """Return the seconds of a microbatch in every stage, with the slowest marked."""
    slowest = max(stage["seconds"] for stage in run["per_stage"])
    bars = []
    for stage in run["per_stage"]:
        parts = [BarPart(op, stage[op], f"{op} {_time(stage[op])}") for op in ("forward", "backward")]
        kind = "slowest" if stage["stage"] == run["slowest_stage"] else ""
        bars.append(bar_row(f"stage {stage['stage']}", parts, slowest, _time(stage["seconds"]), kind=kind))
        if stage["blocks"]:
            ranks = " and ".join(map(str, stage["ranks"]))
            bars.append(f'<p class="note under">{safe(_blocks(stage["blocks"]))}, rank {ranks}</p>')
    keys = legend_html((op, op) for op in ("forward", "backward"))
    return card("Seconds of a microbatch by stage", f"{bar_rows(bars)}{keys}")


def _peaks_section(run: Figures) -> str:
    """Return peaks: what each rank stashed, and how many messages waited on each edge."""
    weighed = all(rank["peak_stash_bytes"] is not None for rank in run["per_rank"])
    key = "peak_stash_bytes" if weighed else "peak_pairs"
    written: Callable[[Any], str] = size_text if weighed else partial(counted, word="pair")
    stashes = {f"rank {rank['rank']}": rank[key] for rank in run["per_rank"]}
    queues = {edge.replace("->", " → "): depth for edge, depth in run["measured"]["peak_queue"].items()}
    waiting = f"<h3>Most messages waiting</h3>{_peaks('queue', queues, str)}" if queues else ""
    return card("Peak stash", _peaks("stash", stashes, written) + waiting)


def _peaks(kind: str, peaks: Mapping[str, float], written: Callable[[Any], str]) -> str:
    most = max(peaks.values())
    shown = ((name, peak, written(peak)) for name, peak in peaks.items())
    return bar_rows(bar_row(name, [BarPart(kind, peak, text)], most, text) for name, peak, text in shown)


def _steps(runs: Sequence[Figures]) -> str:
    """Return curves over steps: loss and speed."""
    wanted: list[tuple[str, str, Callable[[float], str], bool]] = [
        ("loss", "loss", _four, False),
        ("seconds", "seconds from step to step", _time, True),
        ("utilisation", "utilisation", percent, True),
        ("tokens_per_second", "tokens per second and rank", _four, True),
        ("rows_per_second", "rows per second", _four, True),
    ]
    figures = []
    for key, name, written, from_zero in wanted:
        known = [[(step["step"], step[key]) for step in run["per_step"] if step[key] is not None] for run in runs]
        lines = [PlotLine(run_class(at), run["name"], known[at]) for at, run in enumerate(runs)]
        values = [value for line in lines for _, value in line.points]
        if len(values) > 1:
            high, low = max(values), 0.0 if from_zero else min(values)
            marks = [change["step"] for run in runs for change in run["changes"]]
            figures.append(curves(name, lines, written, low=low, high=high, marks=marks))
    if not figures:
        return ""
    keys = run_legend([run["name"] for run in runs]) if len(runs) > 1 else ""
    return (
        f'<section class="report" id="steps"><h2>Steps</h2>{keys}<div class="curves">{"".join(figures)}</div></section>'
    )


def _changes(run: Figures) -> str:
    """Return what was changed during the run, as a table; empty if nothing was."""
    if not run["changes"]:
        return ""
    rows = [cells(change) for change in run["changes"]]
    table = table_html(HEADER, rows, words=(1, 2, 3, 4))
    return f'<section class="report">{card("What was changed while it ran", table, wide=True)}</section>'


def _blocks(names: Sequence[str]) -> str:
    return f"block {names[0]}" if len(names) == 1 else f"blocks {names[0]} to {names[-1]}"


def _four(value: float) -> str:
    return number(value, 4)


def _time(seconds: float) -> str:
    return duration(seconds, micro="µs")
