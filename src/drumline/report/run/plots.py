"""Reports as matplotlib plots for papers: measured and simulated, idle time by cause, the steps of the run."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from drumline.core.timeline.idle import Cause
from drumline.core.timeline.timeline import Timeline
from drumline.core.units import duration
from drumline.report.draw.palette import IDLE, INK, MUTED, RULE, SHADES, TRACK, fill
from drumline.report.draw.scene import OPS
from drumline.report.run.follow import needed
from drumline.report.run.report import RunReport
from drumline.report.summary import idle_by_cause

_STYLE = {
    "font.size": 8,
    "axes.edgecolor": RULE,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "drumline",
    "svg.fonttype": "none",
}
_MILLI = 1e3
_ID = re.compile(rb'(?<=["#])[a-z][0-9a-f]{10}(?=["\)])')
_DENSER = 3  # how often a hatch is repeated


def plots(reports: Sequence[RunReport], *, file_type: str) -> bytes:
    """Return the plots of reports as one picture, PNG or SVG, with a row of plots per run."""
    matplotlib = needed("matplotlib", extra="viz")
    pyplot = needed("matplotlib.figure", extra="viz")
    with matplotlib.rc_context(_STYLE):
        heights = [1.2 + 0.5 * run_report.step.program.num_ranks for run_report in reports]
        figure = pyplot.Figure(figsize=(11, sum(heights) + 0.4 * len(heights)), layout="constrained")
        rows = figure.subfigures(len(reports), 1, squeeze=False, height_ratios=heights)
        for (row,), report in zip(rows, reports, strict=True):
            _row(row, report)
        data = io.BytesIO()
        figure.savefig(data, format=file_type, dpi=200, metadata={"Date": None} if file_type == "svg" else {})
    return renumbered(data.getvalue()) if file_type == "svg" else data.getvalue()


def renumbered(picture: bytes) -> bytes:
    """Return an SVG of matplotlib with its ids numbered in order, so that equal reports give equal files.

    An id is the hash of a place, and the layout's places differ in their last bits from one call to the next.

    >>> renumbered(b'<g id="p0123456789" clip-path="url(#pfedcba9876)"/><path id="pfedcba9876"/>')
    b'<g id="p0" clip-path="url(#p1)"/><path id="p1"/>'
    """
    numbers: dict[bytes, bytes] = {}
    return _ID.sub(lambda match: numbers.setdefault(match[0], b"%c%d" % (match[0][0], len(numbers))), picture)


def _row(figure: Any, report: RunReport) -> None:
    step = report.step
    title = f"{report.name}: {report.step.program.name}, step {step.step}"
    figure.suptitle(title, fontsize=9, fontweight="bold", x=0.01, ha="left")
    axes = figure.subplot_mosaic([["measured", "causes"], ["simulated", "steps"]], width_ratios=[3, 1])
    for name, timeline in (("measured", step.measured), ("simulated", step.simulated)):
        _timeline(axes[name], timeline, name, end=max(step.measured.makespan, step.simulated.makespan))
    _causes(axes["causes"], report)
    _steps(axes["steps"], report)
    _legend(figure, report)


def _legend(figure: Any, report: RunReport) -> None:
    """Explain the colours below the plots."""
    patch = needed("matplotlib.patches", extra="viz").Patch
    used = {part.op for part in report.step.program.work()}
    ops = [patch(color=SHADES[op].odd, label=words.name) for op, words in OPS.items() if op in used]
    causes = [
        patch(facecolor="none", edgecolor=IDLE[cause].light, hatch=_DENSER * IDLE[cause].lines, label=cause.value)
        for cause in map(Cause, idle_by_cause(report.step.measured))
    ]
    options = {"frameon": False, "fontsize": 7, "handlelength": 1.2, "columnspacing": 1.2}
    figure.legend(handles=ops + causes, loc="outside lower left", ncols=len(ops + causes), **options)


def _timeline(axis: Any, timeline: Timeline, name: str, *, end: float) -> None:
    for rank, track in enumerate(timeline.tracks):
        axis.barh(rank, timeline.makespan * _MILLI, height=0.8, color=TRACK, linewidth=0)
        boxes = zip(track.actions, track.starts, track.ends, strict=True)
        spans = [(start - timeline.start, stop - start, action.work[0]) for action, start, stop in boxes]
        axis.broken_barh(
            [(start * _MILLI, length * _MILLI) for start, length, _ in spans],
            (rank - 0.4, 0.8),
            facecolors=[fill(part.op, part.microbatch) for *_, part in spans],
            edgecolor="white",
            linewidth=0.3,
        )
        for cause, hatch in IDLE.items():
            gaps = [idle for idle in timeline.causes_by_rank[rank] if idle.cause is cause]
            axis.broken_barh(
                [((gap.start - timeline.start) * _MILLI, gap.seconds * _MILLI) for gap in gaps],
                (rank - 0.4, 0.8),
                facecolors="none",
                edgecolor=hatch.light,
                hatch=_DENSER * hatch.lines,
                linewidth=0,
            )
    axis.set_title(f"{name}: {duration(timeline.makespan)}, bubble {timeline.bubble:.1%}", loc="left", fontsize=8)
    axis.set_xlim(0, end * _MILLI)
    axis.set_xlabel("milliseconds")
    axis.set_yticks(range(timeline.num_ranks), [f"rank {rank}" for rank in range(timeline.num_ranks)])
    axis.invert_yaxis()


def _causes(axis: Any, report: RunReport) -> None:
    """Draw idle time by cause as a share of the measured makespan."""
    measured = report.step.measured
    causes = idle_by_cause(measured)
    ranks = range(measured.num_ranks)
    left = [0.0] * len(ranks)
    for cause in (reason for reason in Cause if reason in causes):
        shares = [100 * seconds / measured.makespan for seconds in causes[cause]]
        axis.barh(ranks, shares, left=left, height=0.7, color=IDLE[cause].light, label=cause.value)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axis.set_title("bubble by cause, % of makespan", loc="left", fontsize=8)
    axis.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axis.invert_yaxis()


def _steps(axis: Any, report: RunReport) -> None:
    points = [(step["step"], 100 * step["utilisation"]) for step in report.steps if step["utilisation"] is not None]
    axis.plot([step for step, _ in points], [share for _, share in points], color="#0b6aa8", linewidth=1)
    for change in report.changes:
        axis.axvline(change["step"], color=MUTED, linewidth=0.8, linestyle="--")
    axis.set_ylim(0, 100)
    axis.set_title("utilisation by step, %", loc="left", fontsize=8)
    axis.set_xlabel("step")
