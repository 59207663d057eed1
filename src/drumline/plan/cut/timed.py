"""The cut whose step is the shortest: from the evenest ranks, boundaries are moved as long as the simulator says less.

Even ranks are where to begin, not what is wanted: a stage that is late fills others' bubbles, and what a cut takes is
known by running its program. All neighbours of a cut are timed at once, as columns of one compiled program.

    2 | 3 | 3 | 1      12.4 ms      one boundary moved by one or two, or two of them by one
    2 | 3 | 2 | 2      12.1 ms      the best neighbour is next, until none is shorter

Where blocks are frozen, the program has fewer backwards, and a rank holds less, depending on where the cut is; every
number of stages without any backward is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, combinations, pairwise

import numpy as np

from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import makespans
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.chain import BlockCosts, Partition
from drumline.plan.cut.held_pairs import Held, held_by
from drumline.plan.cut.partition import partition, rank_bytes

Counts = tuple[int, ...]

_GAIN = 1e-3  # what a move has to gain, as a part of the step: less is no reason to leave even ranks
_MAX_TIMED = 2_000_000  # actions timed in all: about a second


@dataclass(frozen=True)
class TimedCuts:
    """Cuts of one chain for one schedule; `trains` says of each block whether any of its parameters is trained.

    `costs` returns what the stages of a cut take.
    """

    blocks: Sequence[BlockCosts]
    program: Program
    trains: Sequence[bool]
    costs: Callable[[Counts], Costs]
    max_bytes: float | None = None

    def best(self) -> Partition:
        r"""Return the cut with the shortest simulated step that was found, every rank within `max_bytes`.

        >>> program = Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
        >>> cuts = TimedCuts(
        ...     [BlockCosts(3.0)] * 4, program, [True] * 4, lambda counts: Costs(forward=counts, backward=counts)
        ... )
        >>> cuts.best().counts
        (2, 2)
        """
        begun, problem = self._evenest()
        fitting = [one for one in begun if self._fits(one.counts)]
        if not fitting:
            assert problem is not None, "the evenest cut fits, or is refused"
            raise problem
        seconds = self.makespans([one.counts for one in fitting])
        start = fitting[int(np.argmin(seconds))]
        counts = self._climbed(start.counts, float(min(seconds)))
        ends = list(accumulate(counts, initial=0))
        return replace(
            start,
            counts=counts,
            seconds=tuple(sum(one.seconds for one in self.blocks[i:j]) for i, j in pairwise(ends)),
            rank_bytes=self.rank_bytes(counts),
        )

    def makespans(self, cuts: Sequence[Counts]) -> list[float]:
        """Return what a step takes with each of these cuts."""
        groups: dict[tuple[bool, ...], list[int]] = {}
        for at, counts in enumerate(cuts):
            groups.setdefault(self._trained(counts), []).append(at)
        found = [0.0] * len(cuts)
        for trained, places in groups.items():
            times = makespans(prune(self.program, trained), [self.costs(cuts[at]) for at in places])
            for at, seconds in zip(places, times.tolist(), strict=True):
                found[at] = seconds
        return found

    def pruned(self, counts: Counts) -> Program:
        """Return the program without the backwards that stages of this cut do not need."""
        return prune(self.program, self._trained(counts))

    def rank_bytes(self, counts: Counts) -> tuple[float, ...]:
        """Return every rank's peak under this cut."""
        return rank_bytes(self.blocks, counts, _held_by(self.pruned(counts)))

    def _trained(self, counts: Counts) -> tuple[bool, ...]:
        return tuple(any(self.trains[i:j]) for i, j in pairwise(accumulate(counts, initial=0)))

    def _fits(self, counts: Counts) -> bool:
        return self.max_bytes is None or Limit(max_bytes=self.max_bytes).admits_bytes(max(self.rank_bytes(counts)))

    def _evenest(self) -> tuple[list[Partition], PlanError | None]:
        """Return the cut with the evenest ranks, for each number of stages without a backward; and why none is."""
        stages = self.program.num_stages
        frozen = 0 if any(self.trains) and self.trains[0] else stages - 1
        found, problem = [], None
        for number in range(frozen + 1) if any(self.trains) else [0]:
            held = _held_by(prune(self.program, [False] * number + [True] * (stages - number)))
            try:
                found.append(partition(self.blocks, stages, held=held, max_bytes=self.max_bytes))
            except PlanError as error:
                problem = problem or error
        return found, problem

    def _climbed(self, counts: Counts, seconds: float) -> Counts:
        """Move boundaries to the best neighbour for as long as that makes the step shorter."""
        left = _MAX_TIMED
        while True:
            around = [one for one in dict.fromkeys(neighbours(counts)) if self._fits(one)]
            left -= len(around) * sum(map(len, self.program.rows))
            if not around or left < 0:
                return counts
            times = self.makespans(around)
            best = int(np.argmin(times))
            if times[best] >= seconds * (1 - _GAIN):
                return counts
            counts, seconds = around[best], times[best]


def neighbours(counts: Counts, *, alone: bool = False) -> Iterator[Counts]:
    """Yield the cuts with one boundary moved by one or two blocks, or, unless `alone`, two of them by one."""
    inner = range(1, len(counts))
    moves: list[tuple[tuple[int, int], ...]] = [((at, by),) for at in inner for by in (-1, 1, -2, 2)]
    moves += (
        []
        if alone
        else [((at, by), (to, also)) for at, to in combinations(inner, 2) for by in (-1, 1) for also in (-1, 1)]
    )
    ends = list(accumulate(counts, initial=0))
    for move in moves:
        moved = list(ends)
        for at, by in move:
            moved[at] += by
        if all(i < j for i, j in pairwise(moved)):
            yield tuple(j - i for i, j in pairwise(moved))


@lru_cache(maxsize=64)
def _held_by(program: Program) -> tuple[Held, ...]:
    return held_by(program)
