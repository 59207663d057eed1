"""The best cut of a chain of blocks: the shortest possible largest rank, within every rank's memory.

    blocks   3 1 2 2 4        into 3 stages:   3 1 | 2 2 | 4     largest 4, the smallest possible

Among cuts with the shortest largest rank, the one with the smallest sum of squares wins: it has the most even stages.
With one stage per rank, dynamic programming over (stage, first block) finds both exactly, in O(S n²):

    best(s, i) = min over j of max(seconds(i..j), best(s + 1, j))

and a limit only forbids some (stage, i, j). Several stages on one rank share its time and its memory:

    blocks   1 1 1 1 1 1 1 1 4    as a V on 2 ranks:   1 1 | 1 1 1 | 1 1 1 | 4     2 + 4 on rank 0, 3 + 3 on rank 1

Then the boundaries of that cut move until nothing improves, and a search over all cuts follows, bounded by the table
and by each rank's share of the remaining work. The search is exact unless it runs out of nodes; `Partition.is_exact`
says so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drumline.core.errors import PlanError, counted
from drumline.core.graph import Floats, Ints
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.chain import BlockCosts, BlockTable, CutChain
from drumline.plan.cut.cuts import (
    SLACK,
    Counts,
    Values,
    climb,
    ends_of,
    even_cut,
    neighbours,
    shortest_largest,
    suffixes,
)
from drumline.plan.cut.peaks import HeldPairs

_MAX_MOVES = 20_000  # a second or two
_MAX_NODES = 100_000  # a few seconds
_REACH = 3  # blocks that a boundary moves at a time


@dataclass(frozen=True, slots=True)
class Partition:
    """A cut: the blocks per stage, their seconds per microbatch, and each rank's peak if known.

    `is_exact` is False if a search over stages that share ranks ran out of nodes: a better cut may exist.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    rank_bytes: tuple[float, ...] | None = None
    is_exact: bool = True


def partition(
    blocks: Sequence[BlockCosts],
    num_stages: int,
    *,
    held_pairs: Sequence[HeldPairs] = (),
    max_bytes: float | None = None,
) -> Partition:
    """Return the best cut of `blocks` into stages; `held_pairs`, from `held_by`, says what each rank holds at once.

    >>> partition([BlockCosts(seconds) for seconds in (3, 1, 2, 2, 4)], 3).counts
    (2, 2, 1)
    """
    if not 1 <= num_stages <= len(blocks):
        raise PlanError(
            f"{counted(len(blocks), 'block')} cannot fill {counted(num_stages, 'stage')}",
            expected="at least one block per stage, and at least one stage",
            fix="use fewer ranks or fewer stages per rank, or split the model into smaller blocks"
            if num_stages > len(blocks)
            else "",
        )
    if max_bytes is not None and not held_pairs:
        raise PlanError("max_bytes needs held", expected="what every rank holds, from held_by(program)")
    chain = CutChain(BlockTable(blocks), num_stages, held_pairs)
    counts, is_exact = _best(chain, Limit(max_bytes=max_bytes).most_bytes)
    return partition_at(chain, counts, is_exact, knows_bytes=bool(held_pairs))


def partition_at(chain: CutChain, counts: Counts, is_exact: bool, *, knows_bytes: bool = True) -> Partition:
    """Return a cut as a result, after checking that every block is in exactly one stage."""
    assert len(counts) == chain.num_stages, "a stage is missing"
    assert min(counts) >= 1, "a stage is empty"
    assert sum(counts) == chain.table.num_blocks, "the cut misses a block"
    seconds = np.diff(chain.table.seconds[ends_of(counts)])
    sizes = tuple(chain.rank_bytes([counts])[0].tolist()) if knows_bytes else None
    return Partition(counts, tuple(seconds.tolist()), sizes, is_exact)


def _best(chain: CutChain, limit: float) -> tuple[Counts, bool]:
    """Return the best cut within the limit, and whether it is proven."""
    bounds = Bounds(chain, limit)
    counts = bounds.best_cut()
    if counts is not None and not chain.shares_ranks:
        return counts, True
    even = even_cut(chain.table.num_blocks, chain.num_stages)

    def sizes(many: Sequence[Counts]) -> list[Any]:
        """Return the ranks' peaks, largest first: smaller needs less memory."""
        return [sorted(peaks, reverse=True) for peaks in chain.rank_bytes(many).tolist()]

    def fitting(many: Sequence[Counts]) -> list[Any]:
        """Return by how much each cut exceeds the limit, then how good it is: smaller is better."""
        excess = np.maximum(chain.rank_bytes(many) - limit, 0.0).sum(axis=1).tolist()
        return list(zip(excess, chain.quality(many), strict=True))

    least = even if limit == math.inf else _climbed(even, sizes)
    if counts is not None:
        begun = [_climbed(entry, fitting) for entry in (counts, least)]
        (excess, _), start = min(zip(fitting(begun), begun, strict=True), key=lambda pair: pair[0])
        search = Search(bounds, None if excess > 0 else start)
        if search.best is not None:
            return search.best, search.is_exact
    smallest = Search(Bounds(chain, math.inf), least, smallest=True)
    assert smallest.best is not None, "without a limit some cut fits"
    size = float(chain.rank_bytes([smallest.best]).max())
    if size <= limit:
        return smallest.best, False  # the search for a fast cut gave up before it found any
    raise _too_small(chain, limit, math.ceil(size), smallest.is_exact)


def _climbed(begun: Counts, values: Values) -> Counts:
    """Return the cut from which no move of a boundary, or of a block between stages, reduces the value."""
    rounds = _MAX_MOVES // max(sum(1 for _ in neighbours(begun, reach=_REACH)), 1)
    return climb([begun], values, rounds=rounds, reach=_REACH)


def _too_small(chain: CutChain, limit: float, smallest: int, is_exact: bool) -> PlanError:
    """Return the error that names the smallest limit that works."""
    error = PlanError(
        f"no cut {'of' if is_exact else 'was found of'} {counted(chain.table.num_blocks, 'block')} into"
        f" {counted(chain.num_stages, 'stage')} that keeps every rank within {limit:,.0f} bytes",
        expected=f"max_bytes={smallest} or more",
        fix="use more ranks, smaller microbatches, or a schedule that holds fewer of them",
    )
    error.smallest_bytes = smallest
    return error


class Bounds:
    """For every (stage, first block): the best that this and later stages can do, each alone on its ranks."""

    def __init__(self, chain: CutChain, limit: float) -> None:
        self.chain, self.limit = chain, limit
        firsts, ends = chain.table.grid
        self.seconds = np.where(firsts < ends, chain.table.seconds[ends] - chain.table.seconds[firsts], np.inf)
        sizes = [chain.stage_bytes(stage) for stage in range(chain.num_stages)]
        allowed = [np.where(size <= limit, self.seconds, np.inf) for size in sizes]
        self._on_ranks = [part * seconds for part, seconds in zip(chain.shares.max(axis=0), allowed, strict=True)]
        self._squared = [seconds**2 for seconds in allowed]
        self.largest = suffixes(self._on_ranks, np.maximum)
        self.squares = suffixes(self._squared, np.add)
        self.sizes = suffixes(sizes, np.maximum)

    def best_cut(self) -> Counts | None:
        """Return the best cut as if no stages shared a rank; None if no cut has every stage within the limit."""
        return shortest_largest(self._on_ranks, self._squared)


@dataclass
class Search:
    """Depth-first search over where each stage ends, the most promising first, pruning what cannot beat the best.

    With `smallest`, the objective is the largest rank's bytes instead of seconds.
    """

    bounds: Bounds
    best: Counts | None = None  # the cut to start with, which fits
    smallest: bool = False
    value: tuple[float, float] = (math.inf, math.inf)
    nodes: int = 0
    chain: CutChain = field(init=False)

    def __post_init__(self) -> None:
        self.chain = chain = self.bounds.chain
        stages = range(chain.num_stages)
        # The ranks that have each stage, with what they have so far.
        self._holders = [
            [rank.only([at for at in rank.stages if at <= stage]) for rank in chain.held_pairs if stage in rank.stages]
            for stage in stages
        ]
        # The ranks that have a stage after each one: the remaining work goes to them.
        self._open = [
            [at for at, rank in enumerate(chain.held_pairs) if any(n > stage for n in rank.stages)] for stage in stages
        ]
        if self.best is not None:
            largest = float(chain.rank_bytes([self.best]).max())
            self.value = (largest, 0.0) if self.smallest else chain.quality([self.best])[0]
        self._extend([0], np.zeros(len(chain.held_pairs)), 0.0, 0.0)

    @property
    def is_exact(self) -> bool:
        """Whether the search was complete, or the bound proves that the largest rank cannot be shorter."""
        if self.nodes <= _MAX_NODES:
            return True
        least = max(float(self.bounds.largest[0][0]), float(self.chain.table.seconds[-1]) / len(self.chain.held_pairs))
        return not self.smallest and self.value[0] <= least * (1 + SLACK)

    def _extend(self, ends: list[int], loads: Floats, squares: float, size: float) -> None:
        stage, first, num_blocks = len(ends) - 1, ends[-1], self.chain.table.num_blocks
        if stage == self.chain.num_stages:
            self.best = tuple(np.diff(ends).tolist())
            self.value = (size, 0.0) if self.smallest else (float(loads.max()), squares)
            return
        after = self.chain.num_stages - stage - 1
        nexts = np.arange(first + 1 if after else num_blocks, num_blocks - after + 1)
        now = np.maximum(size, self._rank_sizes(ends, nexts))
        allowed = int((now <= self.bounds.limit).sum())  # a longer slice never takes less
        self.nodes += min(allowed + 1, len(nexts))
        nexts = nexts[: max(allowed - max(self.nodes - _MAX_NODES, 0), 0)]
        now, seconds = now[: len(nexts)], self.bounds.seconds[first, nexts]
        more = loads + seconds[:, None] * self.chain.shares[:, stage]
        even = squares + seconds**2
        if self.smallest:
            bounds = np.maximum(now, self.bounds.sizes[stage + 1][nexts]), np.zeros(len(nexts))
        else:
            bounds = self._least(more, stage, nexts), even + self.bounds.squares[stage + 1][nexts]
        for at in np.lexsort(bounds[::-1]):
            if self._beats(float(bounds[0][at]), float(bounds[1][at])):
                self._extend([*ends, int(nexts[at])], more[at], float(even[at]), float(now[at]))

    def _least(self, loads: Floats, stage: int, ends: Ints) -> Floats:
        """Return a lower bound of the largest rank: what it has, one more stage, or its share of the rest."""
        least: Floats = np.maximum(loads.max(axis=1), self.bounds.largest[stage + 1][ends])
        if open_ranks := self._open[stage]:
            left = self.chain.table.seconds[-1] - self.chain.table.seconds[ends]
            least = np.maximum(least, (loads[:, open_ranks].sum(axis=1) + left) / len(open_ranks))
        return least

    def _beats(self, first: float, second: float) -> bool:
        """Whether this would be better than the best so far; sums that differ by rounding are equal."""
        best, evenness = self.value
        if first == math.inf or first > best * (1 + SLACK):
            return False
        return first < best * (1 - SLACK) or second < evenness * (1 - SLACK)

    def _rank_sizes(self, ends: list[int], nexts: Ints) -> Floats:
        """Return the largest peak of the ranks that hold the last begun stage, for each of its next ends."""
        if self.bounds.limit == math.inf and not self.smallest:
            return np.zeros(len(nexts))
        placed = np.array([[*ends, end] for end in nexts])
        peaks = [
            self.chain.table.rank_bytes(rank, placed[:, np.array(rank.stages)], placed[:, np.array(rank.stages) + 1])
            for rank in self._holders[len(ends) - 1]
        ]
        sizes: Floats = np.max(peaks, axis=0)
        return sizes
