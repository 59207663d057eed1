"""A run in progress, as a few lines of text that are redrawn with every step.

::

    first: 1f1b, 2 ranks, 2 stages, 8 microbatches
    step 39   loss 1.006   802 rows/s   638 ms per step   bubble 24.9%
    loss      ▇▆▅▃▂▁▁
    rank 0    ███████████████▒▒▒▒▒▒▒▒▒▒░·   busy 57%
    rank 1    █████████████████████████▒·   busy 91%
    0 -> 1    ▮▮                            at most 2 messages waiting
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from drumline.core.program import Program
from drumline.core.units import duration, number
from drumline.report.run.follow import PARTS, SECONDS
from drumline.report.summary import counts

_LOSS = "loss_metrics/global_avg_loss"
_RATES = {"throughput(tps)": "tokens/s per rank", "throughput(rows/s)": "rows/s"}
_EDGE = re.compile(r"pp/edge(\d+)-(\d+)/peak_queue")


class Marks(NamedTuple):
    """The characters of bars and curves: one per part, then a message, and heights from low to high."""

    parts: str
    message: str
    heights: str


FINE = Marks("█▒░·!", "▮", "▁▂▃▄▅▆▇█")
ASCII = Marks("#=-.!", "#", "_.-=^")


class LiveRun:
    """What is known about a run so far: its last line, and the losses of earlier lines."""

    def __init__(
        self, name: str, program: Program, *, marks: Marks = FINE, name_of: Callable[[int], str] = str
    ) -> None:
        """`name_of` says what a program is called that some of the steps run by, from its number."""
        self.name = name
        self.name_of = name_of
        self.program = program
        self.marks = marks
        self.line: dict[str, Any] = {}
        self._losses: deque[float] = deque(maxlen=400)

    def add(self, line: dict[str, Any]) -> None:
        """Add a step's metrics."""
        self.line = line
        if line.get(_LOSS) is not None:
            self._losses.append(line[_LOSS])

    def to_json(self) -> dict[str, Any]:
        """Return the last step as an object: what is shown, and all metrics."""
        return {
            "name": self.name,
            "run": self.line.get("run"),
            "step": self.line.get("step"),
            "loss": self.line.get(_LOSS),
            "bubble_per_rank": self._bubbles(),
            "queues": {f"{source}->{target}": depth for (source, target), depth in self._queues().items()},
            "metrics": self.line,
        }

    def row(self) -> str:
        """Return the last step as one line, for logs."""
        known = [f"{bubble:.0%}" for bubble in self._bubbles() if bubble is not None]
        queues = [f"{source}->{target} {number(depth)}" for (source, target), depth in self._queues().items()]
        parts = [self._head()]
        parts += [f"per rank {' '.join(known)}"] if known else []
        parts += [f"queues {', '.join(queues)}"] if queues else []
        return "   ".join(parts)

    def frame(self, width: int = 100) -> str:
        """Draw the current state of the run; no line is wider than `width`."""
        title = f"{self.name}: {self.program.name}, {counts(self.program)}"
        room = max(10, min(60, width - 40))
        lines = [title, self._head()]
        if len(self._losses) > 1:
            lines.append(f"{'loss':<9} {sparkline(list(self._losses)[-room:], self.marks.heights)}")
        for rank, bubble in enumerate(self._bubbles()):
            if bubble is not None:
                seconds = [self.line.get(f"pp/rank{rank}/{part}_seconds") or 0.0 for part in PARTS]
                bar = stacked(seconds, self.marks.parts, room)
                lines.append(f"{f'rank {rank}':<9} {bar}  busy {1 - bubble:>4.0%}  bubble {bubble:>4.0%}")
        scale = min(1.0, room / max(self._queues().values(), default=1.0))
        for (source, target), depth in self._queues().items():
            marks = self.marks.message * round(depth * scale)
            lines.append(f"{f'{source} -> {target}':<9} {marks:<{room}}  at most {number(depth)} waiting")
        if self._bubbles()[0] is not None:
            named = zip(self.marks.parts, PARTS, strict=True)
            lines.append(f"{'':<9} {'  '.join(f'{mark} {part}' for mark, part in named)}")
        return "\n".join(line[:width].rstrip() for line in lines)

    def _head(self) -> str:
        line = self.line
        if not line:
            return "no step yet"
        loss = line.get(_LOSS)
        parts = [f"step {line['step']}", "loss not finite" if loss is None else f"loss {number(loss, 4)}"]
        parts += [f"{number(line[name], 4)} {unit}" for name, unit in _RATES.items() if line.get(name)][:1]
        if line.get(SECONDS):
            parts.append(f"{duration(line[SECONDS])} per step")
        if line.get("program"):
            parts.append(f"by {self.name_of(int(line['program']))}")
        if line.get("pp/bubble") is not None:
            parts.append(f"bubble {line['pp/bubble']:.1%}")
        return "   ".join(parts)

    def _bubbles(self) -> list[float | None]:
        """Return the share of the makespan in which each rank did not compute."""
        makespan = self.line.get("pp/makespan_seconds")
        busy = (self.line.get(f"pp/rank{rank}/busy_seconds") for rank in range(self.program.num_ranks))
        return [None if share is None or not makespan else max(0.0, 1.0 - share / makespan) for share in busy]

    def _queues(self) -> dict[tuple[int, int], float]:
        depths = ((_EDGE.fullmatch(name), depth) for name, depth in self.line.items())
        return {(int(match[1]), int(match[2])): depth for match, depth in depths if match is not None}


def stacked(sizes: Sequence[float], marks: str, room: int) -> str:
    """Draw sizes as stretches of marks that together fill the room.

    >>> stacked([2, 1, 1], "#=-", 8)
    '####==--'
    """
    whole, out, done = sum(sizes), "", 0.0
    for size, mark in zip(sizes, marks, strict=True):
        done += size
        out += mark * (round(done / whole * room) - len(out) if whole > 0 else 0)
    return out.ljust(room)


def sparkline(values: Sequence[float], heights: str) -> str:
    """Return values as a curve one character high.

    >>> sparkline([0.0, 1.0, 2.0], "_-^")
    '_-^'
    """
    low, high = min(values), max(values)
    top = len(heights) - 1
    return "".join(heights[round((value - low) / (high - low) * top) if high > low else 0] for value in values)
