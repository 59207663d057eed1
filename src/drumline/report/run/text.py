"""Reports in the terminal: what to do, each rank's step by what it did, the measured grid."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from drumline.core.errors import counted
from drumline.core.units import duration, percent, size_text
from drumline.report.draw.grid import grid
from drumline.report.draw.table import table
from drumline.report.run.changes import HEADER, cells
from drumline.report.run.follow import PARTS
from drumline.report.run.report import RunReport, which_step
from drumline.report.summary import counts


def reports_text(reports: Sequence[RunReport], *, width: int = 100, colour: bool = False) -> str:
    """Return several reports one after the other, with a table that compares them on top."""
    parts = [report_text(report, width=width, colour=colour) for report in reports]
    if len(reports) > 1:
        parts.insert(0, runs_table(reports, width=width))
    return "\n\n".join(parts)


def report_text(report: RunReport, *, width: int = 100, colour: bool = False) -> str:
    """Return one report as text."""
    step, program = report.step, report.step.program
    measured, simulated = step.measured.makespan, step.simulated.makespan
    slowest = report.stages[report.slowest_stage]
    head = [
        f"{report.name}: {program.name}, {counts(program)}, {which_step(step.step, report.run.steps)}",
        f"makespan {duration(measured)}, bubble {step.measured.bubble:.1%}; simulated with the same seconds "
        f"{duration(simulated)}, the rest ({percent(report.overhead_share)}) is overhead and jitter",
        f"slowest stage {slowest['stage']} on rank {' and '.join(map(str, slowest['ranks']))}: "
        f"{duration(slowest['seconds'])} per microbatch",
        *slow_link(report, slowest["seconds"]),
    ]
    picture = grid(step.measured, width=width, colour=colour, figures=False)
    advice = [report.advice.sentence, *(f"- {other}" for other in report.advice.others)]
    parts = [_wrapped(head, width), ranks_table(report, width=width), picture, *_changed(report, width)]
    return "\n\n".join([*parts, _wrapped(advice, width)])


def _changed(report: RunReport, width: int) -> Iterator[str]:
    """Yield the table of what was changed during the run, if anything was."""
    if report.changes:
        rows = [[cell for name, cell in zip(HEADER, cells(change), strict=True) if name != "why"]
                for change in report.changes]  # fmt: skip
        header = [name for name in HEADER if name != "why"]
        yield table(header, rows, width=width, left=4, keep=("predicted", "real"))


def slow_link(report: RunReport, stage_seconds: float) -> Iterator[str]:
    """Yield the slowest link if a message takes longer there than the slowest stage computes."""
    edges = report.step.costs.edges
    if edges:
        (source, target), edge = max(edges.items(), key=lambda entry: entry[1].latency)
        if edge.latency > stage_seconds:
            text = f"slowest link from rank {source} to rank {target}: {duration(edge.latency)} per message"
            yield f"{text}, longer than any stage takes for a microbatch"


def _wrapped(lines: Sequence[str], width: int) -> str:
    return "\n".join(textwrap.fill(line, max(width, 10), subsequent_indent="  ") for line in lines)


def ranks_table(report: RunReport, *, width: int = 100) -> str:
    """Return the table of ranks: seconds by what they did, idle share, peak stash."""
    rows = []
    for rank in report.ranks:
        cells = [str(rank["rank"]), " ".join(map(str, report.step.program.placement.stages_of(rank["rank"])))]
        cells += [duration(rank[part]) for part in PARTS]
        rows.append([*cells, f"{rank['idle_share']:.1%}", peak_text(rank)])
    return table(["rank", "stages", *PARTS, "idle", "peak stash"], rows, width=width, left=2, keep=("idle",))


def runs_table(reports: Sequence[RunReport], *, width: int = 100) -> str:
    """Return the table that compares runs."""
    header = ["run", "schedule", "makespan", "bubble", "overhead", "slowest stage", "peak stash"]
    rows = []
    for report in reports:
        measured = report.step.measured
        slowest = f"{report.slowest_stage}: {duration(max(report.step.stage_seconds))}"
        shares = (f"{share:.1%}" for share in (measured.bubble, report.overhead_share))
        cells = [report.name, report.step.program.name, duration(measured.makespan), *shares, slowest]
        rows.append([*cells, fullest(report.ranks)])
    return table(header, rows, width=width, left=2, keep=("makespan", "bubble"))


def fullest(ranks: Sequence[dict[str, Any]]) -> str:
    """Return what the fullest rank held."""
    return peak_text(max(ranks, key=lambda entry: (entry["peak_stash_bytes"] or 0, entry["peak_pairs"])))


def peak_text(rank: dict[str, Any]) -> str:
    """Return a rank's peak: bytes if they were weighed, otherwise pairs.

    >>> peak_text({"peak_stash_bytes": None, "peak_pairs": 1}), peak_text({"peak_stash_bytes": 2048, "peak_pairs": 1})
    ('1 pair', '2 KiB')
    """
    weighed = rank["peak_stash_bytes"]
    return counted(rank["peak_pairs"], "pair") if weighed is None else size_text(weighed)
