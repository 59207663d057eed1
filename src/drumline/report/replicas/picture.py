"""Many pipelines as one picture: a cell per rank, darker the more it loses to others, and what its idle time is.

    replica 0   ░░░▒▒▒▓▓▓      one column per rank of a pipeline
    replica 1   ░░░▒▒▒▓▓▓      one row per pipeline

The ranks of the slowest link are framed.
"""

from __future__ import annotations

from collections import defaultdict

from drumline.core.timeline.idle import Cause
from drumline.core.units import number, percent
from drumline.report.draw.palette import IDLE, MUTED, TRACK
from drumline.report.draw.sheet import px, rect, sheet, text
from drumline.report.replicas.step import REASONS, ReplicaStep

_LEFT, _TOP, _WIDTH, _LEVELS = 78.0, 84.0, 900.0, 12
_LOST = (Cause.IMBALANCE, Cause.TRANSFER, "replicas")  # what equal times and free links would not take
_SHADE, _FRAME = "#0b6aa8", "#c4122f"
# Reasons of many pipelines; those of one have the colours that they have everywhere.
_COLOURS = {str(cause): hatch.light for cause, hatch in IDLE.items()} | {"replicas": "#159f78", "exchange": "#9c5fa8"}


def drawing(step: ReplicaStep) -> str:
    """Return the step as an SVG document.

    >>> from drumline.report.replicas.step import replicas
    >>> from drumline.schedules import generate
    >>> svg = drawing(replicas(generate("1f1b", num_ranks=4, num_microbatches=8), num_replicas=2))
    >>> svg.startswith("<svg"), "8 ranks" in svg
    (True, True)
    """
    across = (_WIDTH - _LEFT - 16) / step.program.num_ranks
    down = max(2.0, min(18.0, 440 / step.num_replicas))
    bottom = _TOP + down * step.num_replicas
    share = step.idle[[REASONS.index(reason) for reason in _LOST]].sum(axis=0) / (step.makespan or 1.0)
    runs: dict[int, list[str]] = defaultdict(list)
    least, most = float(share.min()), float(share.max())
    for replica, row in enumerate(((share - least) / ((most - least) or 1.0) * _LEVELS).round().astype(int).tolist()):
        begin = 0
        for rank in range(1, len(row) + 1):
            if rank == len(row) or row[rank] != row[begin]:
                x, y, width = _LEFT + begin * across, _TOP + replica * down, (rank - begin) * across
                runs[row[begin]].append(f"M{px(x)} {px(y)}h{px(width)}v{px(down)}h-{px(width)}z")
                begin = rank
    lines = [rect(_LEFT, _TOP, across * step.program.num_ranks, bottom - _TOP, TRACK)]
    for level, paths in sorted(runs.items()):
        lines.append(f'<path d="{"".join(paths)}" fill="{_SHADE}" fill-opacity="{px(level / _LEVELS)}"/>')
    every = max(1, step.num_replicas // 8)
    lines += [
        text(_LEFT - 6, _TOP + (replica + 0.5) * down + 4, f"{replica}", anchor="end", fill=MUTED)
        for replica in range(0, step.num_replicas, every)
    ]
    lines.append(text(16, _TOP - 8, "replica", fill=MUTED))
    shades = f"{percent(least)} (light) to {percent(most)} (dark)"
    lines.append(
        text(
            _LEFT,
            _TOP - 8,
            f"ranks 0 to {step.program.num_ranks - 1}; lost to {' + '.join(map(str, _LOST))}: {shades}",
            fill=MUTED,
        )
    )
    if (slowest := step.slowest) is not None:
        low, high = sorted((slowest.source, slowest.target))
        x, y = _LEFT + low * across, _TOP + slowest.replica * down
        frame = f'fill="none" stroke="{_FRAME}" stroke-width="1.5"'
        lines.append(
            f'<rect x="{px(x - 1)}" y="{px(y - 1)}" width="{px((high - low + 1) * across + 2)}" '
            f'height="{px(down + 2)}" {frame}/>'
        )
    lines += _bar(step, bottom + 26)
    title = f"{step.program.name}: {step.num_replicas} pipelines of {step.program.num_ranks}, {step.num_ranks} ranks"
    about = f"step {number(step.makespan)}, bubble {percent(step.bubble)}, {step.num_actions} actions"
    return sheet(lines, width=_WIDTH, height=bottom + 84, title=title, about=about)


def _bar(step: ReplicaStep, top: float) -> list[str]:
    """Return one bar of all ranks' time: busy, then idle by reason, with a legend."""
    lines, x, room = [], _LEFT, _WIDTH - _LEFT - 16
    shares = {"busy": 1 - step.bubble, **{str(reason): step.idle_shares[str(reason)] for reason in REASONS}}
    place = _LEFT
    for name, share in shares.items():
        colour = _COLOURS.get(name, TRACK)
        lines.append(rect(x, top, share * room, 18, colour))
        x += share * room
        if share >= 0.0005:
            lines.append(rect(place, top + 28, 10, 10, colour, rim=MUTED))
            label = f"{name} {percent(share)}"
            lines.append(text(place + 14, top + 37, label))
            place += 24 + 6.4 * len(label)
    return lines
