"""Cuts whose stages share ranks, and so memory: a climb to a good one, and the search that proves or betters it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations, pairwise

import numpy as np

from drumline.plan.bounds import Bounds, suffixes
from drumline.plan.chain import Chain

_MAX_NODES = 100_000  # a few seconds
_MAX_MOVES = 20_000  # a second or two
_STEPS = (-3, -2, -1, 1, 2, 3)


def climbed(ends: list[int], value: Callable[[list[int]], tuple[float, ...]]) -> list[int]:
    """Move one or two boundaries by up to three blocks, the best move first, for as long as the value falls."""
    inner = range(1, len(ends) - 1)
    moves: list[tuple[tuple[int, int], ...]] = [((at, by),) for at in inner for by in _STEPS]
    moves += [((at, by), (to, also)) for at, to in combinations(inner, 2) for by in (-1, 1) for also in (-1, 1)]
    best = value(ends)
    for _ in range(_MAX_MOVES // max(len(moves), 1)):
        options = []
        for move in moves:
            moved = list(ends)
            for at, by in move:
                moved[at] += by
            if all(i < j for i, j in pairwise(moved)):
                options.append((value(moved), moved))
        if not options or (least := min(options))[0] >= best:
            break
        best, ends = least
    return ends


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
        self._bounds = Bounds(self.chain, self.limit)
        self._sizes = suffixes([self.chain.stage_bytes(one) for one in range(self.chain.num_stages)], np.maximum)
        self._ranks_of = [
            [(at, rank) for at, rank in enumerate(self.chain.held) if stage in rank.stages]
            for stage in range(self.chain.num_stages)
        ]
        if self.best is not None:
            _, *quality = self.chain.fitting(math.inf, self.best)
            self.value = (self.chain.sizes(self.best)[0], 0.0) if self.smallest else (quality[0], quality[1])
        self._extend([0], 0.0, 0.0, 0.0)

    @property
    def is_exact(self) -> bool:
        """Whether everything was looked at."""
        return self.nodes <= _MAX_NODES

    def _extend(self, ends: list[int], largest: float, squares: float, size: float) -> None:
        stage, first = len(ends) - 1, ends[-1]
        if stage == self.chain.num_stages:
            self.best, self.value = ends, (size, 0.0) if self.smallest else (largest, squares)
            return
        after = self.chain.num_stages - stage - 1
        options = []
        for end in range(first + 1, self.chain.num_blocks - after + 1) if after else [self.chain.num_blocks]:
            self.nodes += 1
            if not self.is_exact:
                break
            now = max(size, self._rank_size([*ends, end], stage))
            seconds = float(self._bounds.seconds[first, end])
            if now > self.limit:
                break  # a longer slice takes no less
            bound: tuple[float, float] = (max(now, float(self._sizes[stage + 1][end])), 0.0)
            if not self.smallest:
                rest = (float(self._bounds.largest[stage + 1][end]), float(self._bounds.squares[stage + 1][end]))
                bound = (max(largest, seconds, rest[0]), squares + seconds**2 + rest[1])
            options.append((bound, end, seconds, now))
        for bound, end, seconds, now in sorted(options):
            if bound < self.value and bound[0] < math.inf:
                self._extend([*ends, end], max(largest, seconds), squares + seconds**2, now)

    def _rank_size(self, ends: list[int], stage: int) -> float:
        """Return the largest peak of the ranks that hold `stage`, with what they have been given so far."""
        cuts = list(pairwise(ends))
        return max(
            self.chain.one_rank(rank, [cuts[one] if one <= stage else (0, 0) for one in rank.stages])
            for _, rank in self._ranks_of[stage]
        )
