"""Improve cuts by simulation: time each cut with its program, and move boundaries as long as the step gets shorter.

Even ranks are the start, not the goal: a stage that is late fills the bubbles of others, and only running the program
shows what a cut costs. So `TimedCuts` moves boundaries as long as the simulated step gets shorter. With frozen blocks,
the program has fewer backwards and a rank holds less, depending on the cut; every possible number of stages without a
backward is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.graph import Floats
from drumline.core.program import Program, once_per_program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import makespans
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.chain import BlockCosts, BlockTable, CutChain
from drumline.plan.cut.cuts import Counts, climb, ends_of, neighbours
from drumline.plan.cut.partition import Partition, partition, partition_at
from drumline.plan.cut.peaks import held_by

_GAIN = 1e-3  # the least gain of a move, as a share of the step: less does not justify leaving even ranks
_MAX_TIMED = 2_000_000  # total number of timed actions: about a second

Steps = Callable[[Program, Sequence[Counts]], Floats]


@dataclass(frozen=True, slots=True)
class TimedCut:
    """A cut, the seconds of its step, every rank's peak, and the sum of shares by which ranks exceed their limits."""

    counts: Counts
    seconds: float
    rank_bytes: tuple[float, ...]
    excess: float

    @property
    def order(self) -> tuple[float, float]:
        """Smaller is better: first the excess over the limits, then seconds."""
        return self.excess, self.seconds


def steps_of(costs: Callable[[Counts], Costs]) -> Steps:
    """Return a function that simulates steps; `costs` returns the costs of the stages of a cut."""
    return lambda program, many: makespans(program, [costs(counts) for counts in many])


@dataclass(frozen=True)
class TimedCuts:
    """Cuts of one chain for one schedule; `steps` returns the step times of a program with each of several cuts.

    The program has the backwards that these cuts need. `limits` are what each rank may hold (default: no limit),
    `recompute` says which stages recompute (default: none).
    """

    blocks: Sequence[BlockCosts]
    program: Program
    steps: Steps
    limits: Sequence[float] = ()
    recompute: Sequence[bool] = ()

    @cached_property
    def table(self) -> BlockTable:
        """The blocks as prefix sums."""
        return BlockTable(self.blocks)

    @cached_property
    def _trains(self) -> list[bool]:
        return [block.trains for block in self.blocks]

    @cached_property
    def _has_frozen(self) -> bool:
        return not all(self._trains)

    def chain(self, program: Program) -> CutChain:
        """Return the blocks on the ranks of a program."""
        return CutChain(self.table, program.num_stages, held_by(program), self.recompute)

    def pruned(self, counts: Counts) -> Program:
        """Return the program without the backwards that stages of this cut do not need."""
        return _pruned(self.program, self._trained(counts))

    def _trained(self, counts: Counts) -> tuple[bool, ...]:
        """Return which stages have anything to train."""
        if not self._has_frozen:
            return (True,) * len(counts)
        return tuple(any(self._trains[i:j]) for i, j in pairwise(ends_of(counts)))

    def timed(self, many: Sequence[Counts], *, weigh: bool = True) -> list[TimedCut]:
        """Time all of these cuts at once; unless they are to be weighed, without the bytes of ranks."""
        alike: dict[tuple[bool, ...], list[Counts]] = {}
        for counts in many:
            alike.setdefault(self._trained(counts), []).append(counts)
        timed_cuts: dict[Counts, TimedCut] = {}
        for trained, cuts in alike.items():
            program = _pruned(self.program, trained)
            seconds = self.steps(program, cuts).tolist()
            bytes_and_excess = self._weighed(program, cuts) if weigh else [((), 0.0)] * len(cuts)
            each = zip(cuts, seconds, bytes_and_excess, strict=True)
            timed_cuts.update((counts, TimedCut(counts, step, *sizes)) for counts, step, sizes in each)
        return [timed_cuts[counts] for counts in many]

    def _weighed(self, program: Program, cuts: Sequence[Counts]) -> list[tuple[tuple[float, ...], float]]:
        """Return what the ranks hold with each cut, and the excess over their limits."""
        limits, sizes = np.array(self.limits or [np.inf]), self.chain(program).rank_bytes(cuts)
        over = (np.maximum(sizes - limits, 0.0) / np.where(np.isfinite(limits), limits, 1.0)).max(axis=1)
        return list(zip(map(tuple, sizes.tolist()), over.tolist(), strict=True))

    def moved(
        self, *starts: Sequence[Counts], value: Callable[[TimedCut], Any], weigh: bool = True, **how: Any
    ) -> TimedCut:
        """Return the cut with the smallest value reachable from the best of each of these `starts`.

        `how` is for `climb`. Without `weigh`, the value is of seconds alone.
        """
        tried: dict[Counts, TimedCut] = {}

        def values(many: Sequence[Counts]) -> list[Any]:
            new = [counts for counts in dict.fromkeys(many) if counts not in tried]
            tried.update(zip(new, self.timed(new, weigh=weigh), strict=True))
            return [value(tried[counts]) for counts in many]

        best = min((tried[climb(some, values, **how)] for some in starts), key=value)
        return best if weigh else self.timed([best.counts])[0]

    def best(self, max_bytes: float | None = None) -> Partition:
        r"""Return the cut with the shortest simulated step found, with every rank within `max_bytes`.

        >>> program = Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
        >>> steps = steps_of(lambda counts: Costs(forward=counts, backward=counts))
        >>> TimedCuts([BlockCosts(3.0)] * 4, program, steps).best().counts
        (2, 2)
        """
        limit = Limit(max_bytes=max_bytes)

        def seconds(cut: TimedCut) -> float:
            return cut.seconds if limit.admits_bytes(max(cut.rank_bytes)) else np.inf

        begun, problem = self._evenest(max_bytes)
        fitting = [cut for cut in self.timed([value.counts for value in begun]) if seconds(cut) < np.inf]
        if not fitting:
            assert problem is not None, "the most even cut fits, or is rejected"
            raise problem
        start = min(fitting, key=seconds).counts
        actions = sum(map(len, self.program.rows)) * sum(1 for _ in neighbours(start))
        rounds = _MAX_TIMED // max(actions, 1)
        counts = self.moved(
            [start], value=seconds, rounds=rounds, better=lambda value, now: value < now * (1 - _GAIN)
        ).counts
        is_exact = next(value.is_exact for value in begun if value.counts == start)
        return partition_at(self.chain(self.pruned(counts)), counts, is_exact)

    def _evenest(self, max_bytes: float | None) -> tuple[list[Partition], PlanError | None]:
        """Return the cut with the most even ranks for each number of stages without a backward, or why none exists."""
        stages = self.program.num_stages
        frozen = 0 if any(self._trains) and self._trains[0] else stages - 1
        partitions, problem = [], None
        for number in range(frozen + 1) if any(self._trains) else [0]:
            held_pairs = held_by(_pruned(self.program, (False,) * number + (True,) * (stages - number)))
            try:
                partitions.append(partition(self.blocks, stages, held_pairs=held_pairs, max_bytes=max_bytes))
            except PlanError as error:
                problem = problem or error
        return partitions, problem


@once_per_program
def _pruned(program: Program, trained: tuple[bool, ...]) -> Program:
    """Return the program for stages of which only these train."""
    return prune(program, trained)
