"""The parts of a timeline: spans of ranks, messages between them, and the rows that they form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeVar

from drumline.core.action import Action


class SpanLane(StrEnum):
    """Where a span is drawn: a rank computes, exchanges gradients, or (without overlap) moves a message itself."""

    COMPUTE = "compute"
    EXCHANGE = "exchange"
    TRANSFER = "transfer"


@dataclass(frozen=True, slots=True)
class Span:
    """One timed action of one rank."""

    rank: int
    action: Action
    start: float
    end: float
    lane: SpanLane = SpanLane.COMPUTE


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message: `made` by its producer, on its way from `start` to `end`, used by its consumer at `consumed`."""

    action: Action
    source: int
    target: int
    made: float
    start: float
    end: float
    consumed: float
    num_bytes: float = 0.0


class StepInterval(NamedTuple):
    """A period between two steps, of a kind: "data", "update", "clip" or another of `core.measured.record.BETWEEN`."""

    rank: int
    kind: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Track:
    """One rank's timed actions in order, with their starts and ends."""

    actions: Sequence[Action]
    starts: Sequence[float]
    ends: Sequence[float]

    @property
    def span(self) -> float:
        """First start to last end; actions that take no time, like a free parameter gather, do not start it."""
        first = (start for start, end in zip(self.starts, self.ends, strict=True) if end > start)
        return self.ends[-1] - next(first, self.ends[-1]) if self.ends else 0.0


Moment = TypeVar("Moment", bound=float)
Said = TypeVar("Said")


def on_top(
    spans: Iterable[tuple[Moment, Moment, Any, Said]], low: Moment, high: Moment
) -> Iterator[tuple[Moment, Moment, Said | None]]:
    """Yield the time from `low` to `high` in pieces, each with what the topmost span over it says, None without any.

    A span is its start and end, its place from the top, and what it says; of equal places, the first to start is on
    top. Neighbouring pieces that say the same are one.

    >>> list(on_top([(1, 9, 2, "outer"), (2, 4, 1, "inner")], 0, 10))
    [(0, 1, None), (1, 2, 'outer'), (2, 4, 'inner'), (4, 9, 'outer'), (9, 10, None)]
    """
    ordered = sorted(spans, key=lambda span: span[0])
    edges = sorted({low, high, *(edge for start, end, *_ in ordered for edge in (start, end) if low < edge < high)})
    covering: list[tuple[Any, int]] = []  # what has ended is removed once it is on top
    upcoming, begun = 0, low
    said: Said | None = None
    for at in edges[:-1]:
        while upcoming < len(ordered) and ordered[upcoming][0] <= at:
            heappush(covering, (ordered[upcoming][2], upcoming))
            upcoming += 1
        while covering and ordered[covering[0][1]][1] <= at:
            heappop(covering)
        now = ordered[covering[0][1]][3] if covering else None
        if now != said:
            if at > begun:
                yield begun, at, said
            begun, said = at, now
    if high > begun:
        yield begun, high, said
