"""Cuts whose stages share ranks, their time and memory: the search that betters one, or proves that none is better."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from drumline.plan.cut.chain import Chain
from drumline.plan.cut.climb import Counts
from drumline.plan.cut.exact import SLACK, shortest_largest, suffixes

_MAX_NODES = 100_000  # a few seconds


class Bounds:
    """For every (stage, first block): the best that this and later stages can do, each with its ranks to itself."""

    def __init__(self, chain: Chain, limit: float) -> None:
        stages = range(chain.num_stages)
        self.seconds = chain.stage_seconds()
        parts = [max(part for rank in chain.ranks for at, part in rank if at == stage) for stage in stages]
        allowed = [np.where(chain.stage_bytes(stage) <= limit, self.seconds, np.inf) for stage in stages]
        self._on_ranks = [part * seconds for part, seconds in zip(parts, allowed, strict=True)]
        self._squared = [seconds**2 for seconds in allowed]
        self.largest = suffixes(self._on_ranks, np.maximum)
        self.squares = suffixes(self._squared, np.add)

    def best_cut(self) -> Counts | None:
        """Return the best cut if no stages shared a rank; None where no cut has every stage within the limit."""
        return shortest_largest(self._on_ranks, self._squared)


@dataclass
class Search:
    """Depth first over where each stage ends, the most promising first, leaving out what cannot beat the best so far.

    With `smallest` the objective is the largest rank's bytes in place of the seconds.
    """

    chain: Chain
    limit: float
    best: list[int] | None = None  # what it begins with, which fits
    smallest: bool = False
    value: tuple[float, float] = (math.inf, math.inf)
    nodes: int = 0
    _bounds: Bounds = field(init=False)

    def __post_init__(self) -> None:
        stages = range(self.chain.num_stages)
        self._bounds = Bounds(self.chain, self.limit)
        self._sizes = suffixes([self.chain.stage_bytes(one) for one in stages], np.maximum)
        self._holders = [[rank for rank in self.chain.held if stage in rank.stages] for stage in stages]
        self._parts = [
            [(at, part) for at, rank in enumerate(self.chain.ranks) for one, part in rank if one == stage]
            for stage in stages
        ]
        # The ranks that have a stage behind each one: what is left to deal goes to them.
        self._open = [
            [at for at, rank in enumerate(self.chain.ranks) if any(one > stage for one, _ in rank)] for stage in stages
        ]
        if self.best is not None:
            self.value = (self.chain.sizes(self.best)[0], 0.0) if self.smallest else self.chain.quality(self.best)
        self._extend([0], [0.0] * len(self.chain.ranks), 0.0, 0.0)

    @property
    def is_exact(self) -> bool:
        """Whether everything was looked at, or the largest rank cannot be shorter by the bound alone."""
        if self.nodes <= _MAX_NODES:
            return True
        least = max(float(self._bounds.largest[0][0]), float(self.chain.seconds[-1]) / len(self.chain.ranks))
        return not self.smallest and self.value[0] <= least * (1 + SLACK)

    def _extend(self, ends: list[int], loads: list[float], squares: float, size: float) -> None:
        stage, first = len(ends) - 1, ends[-1]
        if stage == self.chain.num_stages:
            self.best, self.value = ends, (size, 0.0) if self.smallest else (max(loads), squares)
            return
        after = self.chain.num_stages - stage - 1
        options = []
        for end in range(first + 1, self.chain.num_blocks - after + 1) if after else [self.chain.num_blocks]:
            self.nodes += 1
            if self.nodes > _MAX_NODES:
                break
            now = max(size, self._rank_size([*ends, end], stage))
            if now > self.limit:
                break  # a longer slice takes no less
            seconds = float(self._bounds.seconds[first, end])
            more, bound = loads, (max(now, float(self._sizes[stage + 1][end])), 0.0)
            if not self.smallest:
                more = list(loads)
                for rank, part in self._parts[stage]:
                    more[rank] += part * seconds
                bound = (self._least(more, stage, end), squares + seconds**2 + self._squares(stage + 1, end))
            options.append((bound, end, more, seconds, now))
        for bound, end, more, seconds, now in sorted(options):
            if self._beats(bound):
                self._extend([*ends, end], more, squares + seconds**2, now)

    def _least(self, loads: list[float], stage: int, end: int) -> float:
        """Return what the largest rank takes at least: what it has, one more stage, or its share of what is left."""
        least = max(*loads, float(self._bounds.largest[stage + 1][end]))
        if (open_ranks := self._open[stage]) and least < math.inf:
            left = float(self.chain.seconds[-1] - self.chain.seconds[end])
            least = max(least, (sum(loads[one] for one in open_ranks) + left) / len(open_ranks))
        return least

    def _squares(self, stage: int, first: int) -> float:
        return float(self._bounds.squares[stage][first])

    def _beats(self, bound: tuple[float, float]) -> bool:
        """Whether something this good would be better than the best; sums that differ by rounding are equal."""
        (first, second), (best, evenness) = bound, self.value
        if first == math.inf or first > best * (1 + SLACK):
            return False
        return first < best * (1 - SLACK) or second < evenness * (1 - SLACK)

    def _rank_size(self, ends: list[int], stage: int) -> float:
        """Return the largest peak of the ranks that hold `stage`, with what they have been given so far."""
        if self.limit == math.inf and not self.smallest:
            return 0.0
        cuts = list(pairwise(ends))
        return max(
            self.chain.one_rank(rank, [cuts[one] if one <= stage else (0, 0) for one in rank.stages])
            for rank in self._holders[stage]
        )
