"""Formulas for time and memory, for counts of ranks or microbatches that are too large to simulate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

# Maps (rank, num_ranks, num_microbatches, stages_per_rank) to the most pairs that the rank holds.
PeakPairs = Callable[[int, int, int, int], int]
# Maps (num_ranks, num_microbatches, stages_per_rank) to the idle share of the work, or to whether the counts are valid.
IdleShare = Callable[[int, int, int], float]
Counts = Callable[[int, int, int], bool]


@dataclass(frozen=True, slots=True)
class Pace:
    """Ranks with the same speed: how many, and their seconds per microbatch for F, I (with recomputation) and W."""

    count: int
    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Return the total seconds of a microbatch."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class Paces:
    """All ranks and what they run; `hop_seconds` is the latency between two neighbours."""

    each: Sequence[Pace]
    num_microbatches: int
    stages_per_rank: int = 1
    hop_seconds: float = 0.0

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return sum(pace.count for pace in self.each)

    @cached_property
    def busiest(self) -> Pace:
        """The slowest pace, which limits all microbatches."""
        return max(self.each, key=lambda pace: pace.total)

    @property
    def others(self) -> list[tuple[Pace, int]]:
        """Every pace with the number of ranks that have it, without the busiest rank."""
        return [(pace, pace.count - (pace is self.busiest)) for pace in self.each]

    @property
    def steady(self) -> float:
        """The seconds of all microbatches on the busiest rank."""
        return self.num_microbatches * self.busiest.total

    @property
    def hops(self) -> float:
        """The latency from the first rank to the last."""
        return (self.num_ranks - 1) * self.hop_seconds


Makespan = Callable[[Paces], float]


def fill_and_drain(paces: Paces) -> float:
    """Return the steady part, plus the time the other ranks take for one microbatch before and after it.

    >>> fill_and_drain(Paces([Pace(4, 1.0, 1.0, 1.0)], 8))
    33.0
    """
    others = sum(count * pace.total for pace, count in paces.others)
    return paces.steady + others / paces.stages_per_rank + 2 * paces.hops


def idling(idle: Callable[[Pace, int], float]) -> Makespan:
    """Return the formula of a schedule whose ranks idle for `idle(pace, num_ranks)` seconds when all have that pace.

    >>> idling(lambda pace, num_ranks: (num_ranks - 1) * pace.forward)(Paces([Pace(4, 1.0, 1.0, 1.0)], 8))
    27.0
    """

    def makespan(paces: Paces) -> float:
        idled = sum(count * idle(pace, paces.num_ranks) for pace, count in paces.others)
        return paces.steady + idled / max(paces.num_ranks - 1, 1) / paces.stages_per_rank + 4 * paces.hops

    return makespan


def flush_bubble(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> float:
    """Return the idle share of the work when a pipeline fills and drains once per step.

    >>> flush_bubble(4, 12, 1)
    0.25
    """
    return (num_ranks - 1) / (num_microbatches * stages_per_rank)
