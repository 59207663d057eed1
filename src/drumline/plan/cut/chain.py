"""A chain of blocks as numbers: what any run of them takes, as a stage of some rank.

Where stages share ranks, their time and memory, a search betters a cut, or proves that none is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from drumline.core.errors import PlanError
from drumline.core.simulate.graph import Floats
from drumline.plan.cut.cuts import SLACK, Counts, shortest_largest, suffixes
from drumline.plan.cut.peaks import HeldPairs

_MAX_NODES = 100_000  # a few seconds


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What one block takes in whichever stage it is.

    `activation_bytes` are held per microbatch from F on, `held_until_weight_bytes` of it from I to W (None: the same).
    A stage that begins with this block holds `start_bytes` more per microbatch: what it received. `static_bytes` are
    weights, gradients and optimizer state. Of these, what other blocks hold too is in `tied` by its name: a rank has it
    once.
    """

    seconds: float
    activation_bytes: float = 0.0
    held_until_weight_bytes: float | None = None
    start_bytes: float = 0.0
    static_bytes: float = 0.0
    tied: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Partition:
    """A cut: how many blocks each stage gets, its seconds per microbatch, and each rank's peak where it is known.

    `is_exact` is False where a search over stages that share ranks ran out of nodes: then a better one may exist.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    rank_bytes: tuple[float, ...] | None = None
    is_exact: bool = True


class Chain:
    """The blocks as prefix sums, so that any slice of them is a difference."""

    def __init__(self, blocks: Sequence[BlockCosts], num_stages: int, held: Sequence[HeldPairs]) -> None:
        self.num_blocks = len(blocks)
        self.num_stages = num_stages
        self.held = held
        until = [
            one.activation_bytes if one.held_until_weight_bytes is None else one.held_until_weight_bytes
            for one in blocks
        ]
        self.seconds = _sums([one.seconds for one in blocks])
        self.full = _sums([one.activation_bytes for one in blocks])
        self.until = _sums(until)
        self.static = _sums([one.static_bytes for one in blocks])
        self.start = np.array([one.start_bytes for one in blocks])
        tied = {name: size for one in blocks for name, size in one.tied}
        self.tied = [(size, _sums([name in dict(one.tied) for one in blocks])) for name, size in tied.items()]
        stages = [stage for rank in held for stage in rank.stages]
        self.shares_ranks = any(len(rank.stages) > 1 for rank in held)
        self.ranks = [rank.parts for rank in held] or [((stage, 1.0),) for stage in range(num_stages)]
        if held and set(stages) != set(range(num_stages)):
            raise PlanError(f"held names the stages {sorted(set(stages))}", expected=f"all of 0 to {num_stages - 1}")

    def stage_seconds(self) -> Floats:
        """Return the seconds of every slice, [first, end]; infinite where it is empty."""
        seconds = self.seconds[None, :] - self.seconds[:-1, None]
        return np.where(_proper(self.num_blocks), seconds, np.inf)

    def stage_bytes(self, stage: int) -> Floats:
        """Return what every slice would take as this stage, with its ranks to itself; zeros if nothing is known."""
        size = np.zeros((self.num_blocks, self.num_blocks + 1))
        full = self.full[None, :] - self.full[:-1, None] + self.start[:, None]
        until = self.until[None, :] - self.until[:-1, None]
        static = self.static[None, :] - self.static[:-1, None]
        for tied, uses in self.tied:
            static = static - tied * np.maximum(uses[None, :] - uses[:-1, None] - 1, 0)
        for rank in self.held:
            if stage in rank.stages:
                at = rank.stages.index(stage)
                for f, u in {moment[at] for moment in rank.moments}:
                    np.maximum(size, f * full + u * until + static, out=size)
        return np.where(_proper(self.num_blocks), size, np.inf)

    def rank_bytes(self, ends: Sequence[int]) -> tuple[float, ...]:
        """Return every rank's peak under the cut at `ends`, which begins with 0."""
        cuts = list(pairwise(ends))
        return tuple(self.one_rank(rank, [cuts[stage] for stage in rank.stages]) for rank in self.held)

    def one_rank(self, rank: HeldPairs, slices: Sequence[tuple[int, int]]) -> float:
        """Return a rank's peak where its stages are these slices; an empty one counts for nothing."""
        real = [(i, j, self.start[i] if j > i else 0.0) for i, j in slices]
        twice = sum(tied * max(sum(uses[j] - uses[i] for i, j in slices) - 1, 0) for tied, uses in self.tied)
        return float(
            rank.bytes(
                [self.full[j] - self.full[i] + start for i, j, start in real],
                [self.until[j] - self.until[i] for i, j, _ in real],
                [self.static[j] - self.static[i] for i, j, _ in real],
            )
            - twice
        )

    def rank_seconds(self, ends: Sequence[int]) -> tuple[float, ...]:
        """Return what every rank computes for one microbatch, on average over them."""
        seconds = np.diff(self.seconds[list(ends)])
        return tuple(float(sum(part * seconds[stage] for stage, part in rank)) for rank in self.ranks)

    def quality(self, ends: Sequence[int]) -> tuple[float, float]:
        """Return how long the largest rank takes, then how uneven the stages are: the smaller, the better."""
        return max(self.rank_seconds(ends)), float((np.diff(self.seconds[list(ends)]) ** 2).sum())

    def sizes(self, ends: Sequence[int]) -> tuple[float, ...]:
        """Return the ranks' peaks, largest first: the smaller, the less memory a cut needs."""
        return tuple(sorted(self.rank_bytes(ends), reverse=True))

    def fitting(self, limit: float, ends: Sequence[int]) -> tuple[float, ...]:
        """Return by how much a cut exceeds the limit, then how good it is: the smaller, the better."""
        excess = sum(max(size - limit, 0.0) for size in self.rank_bytes(ends))
        return excess, *self.quality(ends)

    def partition(self, ends: Sequence[int], is_exact: bool) -> Partition:
        """Return the cut at `ends` as a result, having checked that every block is in exactly one stage."""
        assert ends[0] == 0, "the cut misses the first block"
        assert ends[-1] == self.num_blocks, "the cut misses the last block"
        assert all(i < j for i, j in pairwise(ends)), "a stage is empty"
        return Partition(
            tuple(j - i for i, j in pairwise(ends)),
            tuple(float(self.seconds[j] - self.seconds[i]) for i, j in pairwise(ends)),
            self.rank_bytes(ends) if self.held else None,
            is_exact,
        )


def _sums(values: Sequence[float]) -> Floats:
    return np.array(list(accumulate(values, initial=0.0)))


def _proper(num_blocks: int) -> npt.NDArray[np.bool_]:
    """Return which slices [first, end] hold a block."""
    return np.arange(num_blocks)[:, None] < np.arange(num_blocks + 1)[None, :]


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
                rest = float(self._bounds.squares[stage + 1][end])
                bound = (self._least(more, stage, end), squares + seconds**2 + rest)
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
