"""The best cut of a chain of blocks: the largest rank as short as it can be, within every rank's memory.

    blocks   3 1 2 2 4        into 3 stages:   3 1 | 2 2 | 4     largest 4, and no cut has a smaller one

Among cuts with the shortest largest rank, the one with the smallest sum of squares is taken: stages are as even as that
allows. With one stage on every rank both are found exactly, by dynamic programming over (stage, first block), O(S n²):

    best(s, i) = min over j of max(seconds(i..j), best(s + 1, j))

and a limit only forbids some (stage, i, j). Several stages on one rank share its time and its memory:

    blocks   1 1 1 1 1 1 1 1 4    as a V on 2 ranks:   1 1 | 1 1 1 | 1 1 1 | 4     2 + 4 on rank 0, 3 + 3 on rank 1

Then the boundaries of that cut are moved until nothing gets better, and from there all cuts are searched, with the
table and the share of what is left as bounds. The search is exact unless it runs out of nodes, and says so
(`Partition.is_exact`).

Even ranks are where to begin, not what is wanted: a stage that is late fills others' bubbles, and what a cut takes is
known by running its program. So `TimedCuts` moves boundaries for as long as the simulator says less. Where blocks are
frozen, the program has fewer backwards, and a rank holds less, depending on where the cut is; every number of stages
without any backward is tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise

import numpy as np

from drumline.core.costs import Costs
from drumline.core.errors import PlanError, counted
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import makespans
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.chain import BlockCosts, Bounds, Chain, Partition, Search
from drumline.plan.cut.cuts import Counts, by_training, climb, ends_of, even_cut, neighbours, trained
from drumline.plan.cut.peaks import HeldPairs, held_by

_MAX_MOVES = 20_000  # a second or two
_REACH = 3  # blocks that a boundary moves at once
_GAIN = 1e-3  # what a move has to gain, as a part of the step: less is no reason to leave even ranks
_MAX_TIMED = 2_000_000  # actions timed in all: about a second


def partition(
    blocks: Sequence[BlockCosts], num_stages: int, *, held: Sequence[HeldPairs] = (), max_bytes: float | None = None
) -> Partition:
    """Return the best cut of `blocks` into stages; `held`, from `held_by`, says what each rank holds at once.

    >>> partition([BlockCosts(seconds) for seconds in (3, 1, 2, 2, 4)], 3).counts
    (2, 2, 1)
    """
    if not 1 <= num_stages <= len(blocks):
        raise PlanError(
            f"{counted(len(blocks), 'block')} for {counted(num_stages, 'stage')}",
            expected="at least one block per stage, and at least one stage",
        )
    if max_bytes is not None and not held:
        raise PlanError("max_bytes without held", expected="what every rank holds, as held_by(program) tells")
    chain = Chain(blocks, num_stages, held)
    limit = Limit(max_bytes=max_bytes).most_bytes
    found = Bounds(chain, limit).best_cut()
    if found is not None and not chain.shares_ranks:
        return chain.partition(ends_of(found), True)
    even = even_cut(chain.num_blocks, num_stages)
    least = even if limit == math.inf else _climbed(even, chain.sizes)
    if found is not None:
        value = partial(chain.fitting, limit)
        begun = min((ends_of(_climbed(one, value)) for one in (found, least)), key=value)
        fits = limit == math.inf or max(chain.rank_bytes(begun)) <= limit
        search = Search(chain, limit, begun if fits else None)
        if search.best is not None:
            return chain.partition(search.best, search.is_exact)
    smallest = Search(chain, math.inf, ends_of(least), smallest=True)
    assert smallest.best is not None, "without a limit something fits"
    if max(chain.rank_bytes(smallest.best)) <= limit:
        return chain.partition(smallest.best, False)  # the search for a fast one gave up before it found any
    raise _too_small(chain, limit, smallest)


def _climbed(begun: Counts, value: Callable[[list[int]], tuple[float, ...]]) -> Counts:
    """Return the cut at which no move of one or two boundaries makes the value smaller any more."""
    rounds = _MAX_MOVES // max(sum(1 for _ in neighbours(begun, reach=_REACH)), 1)
    return climb([begun], lambda many: [value(ends_of(one)) for one in many], rounds=rounds, reach=_REACH)


def rank_bytes(blocks: Sequence[BlockCosts], counts: Sequence[int], held: Sequence[HeldPairs]) -> tuple[float, ...]:
    """Return every rank's peak under a given cut.

    >>> rank = HeldPairs(stages=(0,), moments=(((2, 0),),))
    >>> rank_bytes([BlockCosts(1.0, activation_bytes=10, static_bytes=5)] * 3, [3], [rank])
    (75.0,)
    """
    return Chain(blocks, len(counts), held).rank_bytes(ends_of(counts))


def _too_small(chain: Chain, limit: float, least: Search) -> PlanError:
    """Return the error that names the smallest limit that would do."""
    assert least.best is not None
    smallest = math.ceil(max(chain.rank_bytes(least.best)))
    error = PlanError(
        f"no cut {'of' if least.is_exact else 'was found of'} {counted(chain.num_blocks, 'block')} into"
        f" {counted(chain.num_stages, 'stage')} that keeps every rank within {limit:,.0f} bytes",
        expected=f"max_bytes={smallest} or more",
        fix="use more ranks, smaller microbatches, or a schedule that holds fewer of them",
    )
    error.smallest_bytes = smallest
    return error


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
