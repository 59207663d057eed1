"""A timeline in the terminal: one line per rank, time to the right.

    rank 0 |F0 F1 .. .. .. B0--- F2 B1--- .. B2--- | idle 31% peak 2
    rank 1 |.. F0 B0--- F1 B1--- F2 B2--- .. .. ..| ...

Every column is the same amount of time. If labels do not fit the terminal, each column shows one letter: the op. With
two stages on a rank, lower-case letters mark the second; with more, labels include the stage number.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from drumline.core.action import Action, Op, placed
from drumline.core.timeline.timeline import Timeline
from drumline.core.units import number
from drumline.report.draw.palette import IDLE

_WIDE = 60  # columns with room for figures beside the lines
_LETTERS = {
    Op.FORWARD: "F",
    Op.BACKWARD: "B",
    Op.BACKWARD_INPUT: "I",
    Op.BACKWARD_WEIGHT: "W",
    Op.UPDATE: "U",
    Op.UNSHARD: "G",
    Op.RESHARD: "R",
}

# Okabe-Ito blue, green, orange, vermilion as 256-colour backgrounds, for even and odd microbatches; paler ones for
# every second slice of them.
_COLOURS: dict[Op, tuple[int, int, int, int]] = {
    Op.FORWARD: (75, 32, 117, 74),
    Op.BACKWARD: (79, 36, 122, 78),
    Op.BACKWARD_INPUT: (79, 36, 122, 78),
    Op.BACKWARD_WEIGHT: (221, 214, 229, 222),
    Op.UPDATE: (175, 175, 175, 175),
    Op.OVERLAP: (147, 104, 183, 146),
}


@dataclass(frozen=True, slots=True)
class _Canvas:
    """Maps time to columns."""

    start: float
    slot: float
    num_slots: int
    cell: int

    def columns(self, start: float, end: float) -> tuple[int, int]:
        """Return the first column of a time interval, and one past the last."""
        low = round((start - self.start) / self.slot) * self.cell
        high = round((end - self.start) / self.slot) * self.cell
        return max(low, 0), min(max(high, low), self.num_slots * self.cell)


def grid(
    timeline: Timeline,
    *,
    width: int = 100,
    colour: bool = False,
    window: tuple[float, float] | None = None,
    figures: bool = True,
    memory: bool = False,
) -> str:
    r"""Draw a timeline; no line is wider than `width`.

    `figures` adds idle share and peak to each line, or below if lines are short; `memory` adds a strip with the pairs
    that the rank holds. The peak is in such pairs, too: `peak_activations`.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> print(grid(simulate(Program.parse("0F0,0B0\n1F0,1B0"))))
    rank 0 |F0 .. .. .. B0--- | idle 50% peak 1
    rank 1 |.. F0 B0--- .. .. | idle 50% peak 1
    """
    start, end = window or (timeline.start, timeline.end)
    name_of = _labels(timeline)
    prefix, suffix = _margins(timeline, width, figures)
    room = width - len(prefix[0]) - max(map(len, suffix)) - 2
    canvas = _fit(timeline, start, end, name_of, max(room, 1))
    lines = []
    for rank in range(timeline.num_ranks):
        body = _row(timeline, rank, canvas, name_of, colour)
        lines.append(f"{prefix[rank]}|{body}|{suffix[rank]}".rstrip() if room > 0 else body)
        if memory:
            held_row = _held_row(timeline, rank, canvas)
            lines.append(f"{'held'[: len(prefix[rank])]:<{len(prefix[rank])}}|{held_row}|" if room > 0 else held_row)
    below = [*(_figures(timeline) if figures and not suffix[0] else ()), _note(timeline, canvas, window)]
    return "\n".join([*lines, *(piece for line in below for piece in textwrap.wrap(line, width))])


def legend(timeline: Timeline) -> str:
    """Return a line that explains the letters, and what is counted if ranks hold several stages; empty if nothing."""
    per_rank = max(len(timeline.program.placement.stages_of(rank)) for rank in range(timeline.num_ranks))
    if timeline.program.placement.mirrored:
        return "Lower-case letters: microbatches going up, on the rank's second copy."
    letters = "Lower-case letters: the rank's second stage. " if per_rank == 2 else ""
    part = "slice" if timeline.program.num_slices > 1 else "microbatch"
    return f"{letters}Peak: activations held, one per stage and {part}." if per_rank > 1 or part == "slice" else ""


def _margins(timeline: Timeline, width: int, figures: bool) -> tuple[list[str], list[str]]:
    """Return the text before and after each rank's line; narrow terminals omit it."""
    digits = len(str(timeline.num_ranks - 1))
    prefix = [f"{rank:<{digits}}" if width < 30 else f"rank {rank:<{digits}} " for rank in range(timeline.num_ranks)]
    if width < _WIDE or not figures:
        return prefix, [""] * timeline.num_ranks
    peaks = timeline.peak_activations
    peak_digits = len(str(max(peaks, default=0)))
    return prefix, [f" idle {s:>3.0%} peak {p:>{peak_digits}}" for s, p in zip(_shares(timeline), peaks, strict=True)]


def _shares(timeline: Timeline) -> list[float]:
    return [idle / (timeline.makespan or 1.0) for idle in timeline.idle]


def _figures(timeline: Timeline) -> tuple[str, str]:
    """Return what stands after each rank's line, as lines for all ranks."""
    idle = " ".join(f"{share:.0%}" for share in _shares(timeline))
    return f"idle {idle}", f"peak activations {' '.join(map(str, timeline.peak_activations))}"


def _labels(timeline: Timeline) -> Callable[[int, Action], str]:
    placement = timeline.program.placement
    stages = [placement.stages_of(rank) for rank in range(timeline.num_ranks)]

    def label(rank: int, part: Action) -> str:
        letter = _LETTERS.get(part.op, "?")
        number = "" if part.microbatch is None else str(part.microbatch)
        if placement.mirrored:
            up = part.microbatch is not None and part.microbatch in placement.mirrored
            return (letter.lower() if up else letter) + number
        if len(stages[rank]) > 2:
            return f"{part.stage}{letter}{number}"
        return (letter.lower() if part.stage != stages[rank][0] else letter) + number

    return lambda rank, action: "".join(label(rank, part) for part in action.work)


def _fit(timeline: Timeline, start: float, end: float, name_of: Callable[[int, Action], str], room: int) -> _Canvas:
    """Choose the time per column and its width: labels if they fit, otherwise one letter per column."""
    spans = [span for span in timeline.spans() if span.end > span.start and span.end > start and span.start < end]
    slot = _common_unit([span.end - span.start for span in spans] + [span.start - timeline.start for span in spans])
    length = end - start
    if slot is not None and length > 0:
        num_slots = math.ceil(length / slot - 1e-9)
        widest = 1
        for span in spans if num_slots * 2 <= room else ():
            slots = max(round((span.end - span.start) / slot), 1)
            widest = max(widest, math.ceil((len(name_of(span.rank, span.action)) + 1) / slots))
        cell = max(widest, 2)
        if num_slots * cell <= room:
            return _Canvas(start, slot, num_slots, cell)
        if num_slots <= room:
            return _Canvas(start, slot, num_slots, 1)
    return _Canvas(start, length / room if length > 0 else 1.0, room, 1)


def _common_unit(seconds: list[float]) -> float | None:
    """Return the longest time that divides all of `seconds`, or None if there is no sensible one.

    >>> _common_unit([2.0, 3.0]), _common_unit([0.5, 1.0]), _common_unit([1.0, math.pi])
    (1.0, 0.5, None)
    """
    unit = min((duration for duration in seconds if duration > 0), default=0.0)
    for _ in range(64 if unit > 0 else 0):
        rests = [abs(duration - unit * round(duration / unit)) for duration in seconds]
        if max(rests) <= 1e-6 * unit:
            return unit
        unit = min(rest for rest in rests if rest > 1e-9 * unit)
        if unit <= max(seconds) * 1e-4:
            return None
    return None


def _row(timeline: Timeline, rank: int, canvas: _Canvas, name_of: Callable[[int, Action], str], colour: bool) -> str:
    labelled = canvas.cell > 1
    text = [*(".." if canvas.cell > 1 else ".").ljust(canvas.cell)] * canvas.num_slots
    paint = [""] * len(text)
    track = timeline.tracks[rank]
    for idle in timeline.causes_by_rank[rank] if colour else ():
        low, high = canvas.columns(idle.start, idle.end)
        paint[low:high] = [f"38;5;{IDLE[idle.cause].terminal}"] * (high - low)
    for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
        low, high = canvas.columns(start, end)
        if high <= low:
            continue
        name = name_of(rank, action)
        if labelled:
            body = name[: high - low].ljust(high - low - 1, "-")[: high - low].ljust(high - low)
        else:
            body = _LETTERS.get(action.op, "X") * (high - low)
            body = body.lower() if name[:1].islower() else body
        text[low:high] = body
        shade = _COLOURS.get(action.op)
        microbatch, part = placed(action.work[0].microbatch)
        hue = shade[microbatch % 2 + 2 * (part % 2)] if shade else 0
        paint[low:high] = [f"48;5;{hue};38;5;16" if shade else ""] * (high - low)
        if labelled and high - low > 1 and body.endswith(" "):
            paint[high - 1] = ""
    return _painted(text, paint) if colour else "".join(text)


def _held_row(timeline: Timeline, rank: int, canvas: _Canvas) -> str:
    """Return the pairs held in every column: a number if labels fit, otherwise a digit (9 means 9 or more)."""
    track, holding = timeline.tracks[rank], timeline.memory[rank]
    text = [" "] * (canvas.num_slots * canvas.cell)
    ends = [*track.starts[1:], timeline.end]
    for index, (during, after) in enumerate(holding.pairs):
        for low, high, num_held in (
            (*canvas.columns(track.starts[index], track.ends[index]), during),
            (*canvas.columns(track.ends[index], ends[index]), after),
        ):
            for at in range(low, high, canvas.cell):
                shown = str(num_held) if canvas.cell > 1 else str(min(num_held, 9))
                text[at : at + canvas.cell] = shown[: canvas.cell].ljust(canvas.cell)
    return "".join(text)


def _painted(text: list[str], paint: list[str]) -> str:
    """Return the line with the terminal's colour codes."""
    out, current = [], ""
    for character, shade in zip(text, paint, strict=True):
        if shade != current:
            out.append("\x1b[0m" + (f"\x1b[{shade}m" if shade else ""))
            current = shade
        out.append(character)
    return "".join(out) + ("\x1b[0m" if current else "")


def _note(timeline: Timeline, canvas: _Canvas, window: tuple[float, float] | None) -> str:
    shown = canvas.slot * canvas.num_slots
    if window is not None:
        return f"Shown: {number(canvas.start)} to {number(canvas.start + shown)} of {number(timeline.makespan)}."
    if canvas.cell == 1:
        return f"Compressed: one column is {number(canvas.slot, 3)}. Labels need a wider terminal or a window."
    return ""
