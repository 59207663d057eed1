"""A chain of blocks as numbers: what any run of them takes, as a stage of some rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from drumline.core.errors import PlanError
from drumline.plan.cut.peaks import HeldPairs

Floats = npt.NDArray[np.float64]


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
