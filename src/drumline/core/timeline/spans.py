"""The parts of a timeline: spans of ranks, messages between them, and the rows that they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

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


@dataclass(frozen=True, slots=True)
class Passed:
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
