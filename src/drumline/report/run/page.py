"""Reports as one offline page: what to change, measured over simulated timelines, and where the time went."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.html import asset, page_with
from drumline.report.draw.scene import document
from drumline.report.run.panels import above, below
from drumline.report.run.report import RunReport
from drumline.report.units import counts, duration


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
    return page_with(data, panel=above(figures), below=below(figures), style=asset("report.css"))


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
