"""The cut whose step is the shortest: from the evenest ranks, boundaries are moved as long as the simulator says less.

Even ranks are where to begin, not what is wanted: a stage that is late fills others' bubbles, and what a cut takes is
known by running its program.

Where blocks are frozen, the program has fewer backwards, and a rank holds less, depending on where the cut is; every
number of stages without any backward is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import makespans
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.chain import BlockCosts, Partition
from drumline.plan.cut.climb import Counts, by_training, climb, ends_of, neighbours, trained
from drumline.plan.cut.partition import partition, rank_bytes
from drumline.plan.cut.peaks import HeldPairs, held_by

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
        start = fitting[int(np.argmin(self.makespans([one.counts for one in fitting])))]
        actions = sum(map(len, self.program.rows)) * sum(1 for _ in neighbours(start.counts))
        rounds = _MAX_TIMED // max(actions, 1)
        counts = climb([start.counts], self._within, rounds=rounds, better=lambda one, now: one < now * (1 - _GAIN))
        return replace(
            start,
            counts=counts,
            seconds=tuple(sum(one.seconds for one in self.blocks[i:j]) for i, j in pairwise(ends_of(counts))),
            rank_bytes=self.rank_bytes(counts),
        )

    def _within(self, cuts: Sequence[Counts]) -> list[float]:
        """Return what a step takes with each of these cuts; infinitely long where a rank is over the limit."""
        fitting = [one for one in cuts if self._fits(one)]
        seconds = dict(zip(fitting, self.makespans(fitting), strict=True))
        return [seconds.get(one, np.inf) for one in cuts]

    def makespans(self, cuts: Sequence[Counts]) -> list[float]:
        """Return what a step takes with each of these cuts."""
        found = [0.0] * len(cuts)
        for stages, places in by_training(self.trains, cuts).items():
            times = makespans(prune(self.program, stages), [self.costs(cuts[at]) for at in places])
            for at, seconds in zip(places, times.tolist(), strict=True):
                found[at] = seconds
        return found

    def pruned(self, counts: Counts) -> Program:
        """Return the program without the backwards that stages of this cut do not need."""
        return prune(self.program, trained(self.trains, counts))

    def rank_bytes(self, counts: Counts) -> tuple[float, ...]:
        """Return every rank's peak under this cut."""
        return rank_bytes(self.blocks, counts, _held_by(self.pruned(counts)))

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


@lru_cache(maxsize=64)
def _held_by(program: Program) -> tuple[HeldPairs, ...]:
    return held_by(program)
