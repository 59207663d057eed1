"""The best cut of a chain of blocks: the largest stage as short as it can be, within every rank's memory.

    blocks   3 1 2 2 4        into 3 stages:   3 1 | 2 2 | 4     largest 4, and no cut has a smaller one

Among cuts with the shortest largest stage, the one with the smallest sum of squares is taken: the rest is as even as it
goes. Both are found exactly, by dynamic programming over (stage, first block), O(S n²):

    best(s, i) = min over j of max(seconds(i..j), best(s + 1, j))

A rank with one stage has a memory of its own, so a limit only forbids some (stage, i, j). Several stages on one rank
share its memory; then the cut found without sharing is taken if it happens to fit. Otherwise its boundaries are moved
until it does and nothing gets better, and from there all cuts are searched, with that table as the bound. The search is
exact unless it runs out of nodes, and says so (`Partition.is_exact`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, combinations, pairwise

import numpy as np
import numpy.typing as npt

from drumline.core.errors import PlanError, counted
from drumline.plan.held import Held

Floats = npt.NDArray[np.float64]

_MAX_NODES = 100_000  # a few seconds
_MAX_MOVES = 20_000  # a second or two
_STEPS = (-3, -2, -1, 1, 2, 3)
_SLACK = 1e-12  # of the largest stage: seconds are sums in floating point


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What one block takes in whichever stage it is.

    `activation_bytes` are held per microbatch from F on, `held_until_weight_bytes` of it from I to W (None: the same).
    A stage that begins with this block holds `start_bytes` more per microbatch: what it received. `static_bytes` are
    weights, gradients and optimizer state.
    """

    seconds: float
    activation_bytes: float = 0.0
    held_until_weight_bytes: float | None = None
    start_bytes: float = 0.0
    static_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Partition:
    """A cut: how many blocks each stage gets, its seconds per microbatch, and each rank's peak where it is known.

    `is_exact` is False where a search over stages that share ranks ran out of nodes: then a better one may exist.
    """

    counts: tuple[int, ...]
    seconds: tuple[float, ...]
    rank_bytes: tuple[float, ...] | None = None
    is_exact: bool = True


def partition(
    blocks: Sequence[BlockCosts], num_stages: int, *, held: Sequence[Held] = (), max_bytes: float | None = None
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
    chain = _Chain(blocks, num_stages, held)
    limit = math.inf if max_bytes is None else max_bytes
    found = _Bounds(chain, limit).best_cut()
    if found is not None and max(chain.rank_bytes(found), default=0.0) <= limit:
        return chain.partition(found, True)
    even = [stage * chain.num_blocks // num_stages for stage in range(num_stages + 1)]
    least = _climbed(even, chain.sizes)
    if found is not None and chain.shares_ranks:
        begun = min(
            (_climbed(one, partial(chain.fitting, limit)) for one in (found, least)), key=partial(chain.fitting, limit)
        )
        fits = max(chain.rank_bytes(begun)) <= limit
        search = _Search(chain, limit, begun if fits else None)
        if search.best is not None:
            return chain.partition(search.best, search.is_exact)
    smallest = _Search(chain, math.inf, least, smallest=True)
    assert smallest.best is not None, "without a limit something fits"
    if max(chain.rank_bytes(smallest.best)) <= limit:
        return chain.partition(smallest.best, False)  # the search for a fast one gave up before it found any
    raise _too_small(chain, limit, smallest)


def rank_bytes(blocks: Sequence[BlockCosts], counts: Sequence[int], held: Sequence[Held]) -> tuple[float, ...]:
    """Return every rank's peak under a given cut.

    >>> rank = Held(stages=(0,), moments=(((2, 0),),))
    >>> rank_bytes([BlockCosts(1.0, activation_bytes=10, static_bytes=5)] * 3, [3], [rank])
    (75.0,)
    """
    return _Chain(blocks, len(counts), held).rank_bytes(list(accumulate(counts, initial=0)))


class _Chain:
    """The blocks as prefix sums, so that any slice of them is a difference."""

    def __init__(self, blocks: Sequence[BlockCosts], num_stages: int, held: Sequence[Held]) -> None:
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
        stages = [stage for rank in held for stage in rank.stages]
        self.shares_ranks = any(len(rank.stages) > 1 for rank in held)
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

    def one_rank(self, rank: Held, slices: Sequence[tuple[int, int]]) -> float:
        """Return a rank's peak where its stages are these slices; an empty one counts for nothing."""
        real = [(i, j, self.start[i] if j > i else 0.0) for i, j in slices]
        return float(
            rank.bytes(
                [self.full[j] - self.full[i] + start for i, j, start in real],
                [self.until[j] - self.until[i] for i, j, _ in real],
                [self.static[j] - self.static[i] for i, j, _ in real],
            )
        )

    def sizes(self, ends: Sequence[int]) -> tuple[float, ...]:
        """Return the ranks' peaks, largest first: the smaller, the less memory a cut needs."""
        return tuple(sorted(self.rank_bytes(ends), reverse=True))

    def fitting(self, limit: float, ends: Sequence[int]) -> tuple[float, ...]:
        """Return by how much a cut exceeds the limit, then how good it is: the smaller, the better."""
        seconds = np.diff(self.seconds[list(ends)])
        excess = sum(max(size - limit, 0.0) for size in self.rank_bytes(ends))
        return excess, float(seconds.max()), float((seconds**2).sum())

    def partition(self, ends: Sequence[int], is_exact: bool) -> Partition:
        assert ends[0] == 0, "the cut misses the first block"
        assert ends[-1] == self.num_blocks, "the cut misses the last block"
        assert all(i < j for i, j in pairwise(ends)), "a stage is empty"
        return Partition(
            tuple(j - i for i, j in pairwise(ends)),
            tuple(float(self.seconds[j] - self.seconds[i]) for i, j in pairwise(ends)),
            self.rank_bytes(ends) if self.held else None,
            is_exact,
        )


class _Bounds:
    """For every (stage, first block): the best that this and later stages can do, each with its ranks to itself."""

    def __init__(self, chain: _Chain, limit: float) -> None:
        self.chain = chain
        self.fits = [chain.stage_bytes(stage) <= limit for stage in range(chain.num_stages)]
        self.seconds = chain.stage_seconds()
        allowed = [np.where(fits, self.seconds, np.inf) for fits in self.fits]
        self.largest = _suffixes(allowed, np.maximum)
        self.squares = _suffixes([one**2 for one in allowed], np.add)

    def best_cut(self) -> list[int] | None:
        """Return where the stages end, from 0 on; None where no cut has every stage within the limit."""
        largest = self.largest[0][0]
        if largest == np.inf:
            return None
        short = self.seconds <= largest * (1 + _SLACK)
        allowed = [np.where(fits & short, self.seconds**2, np.inf) for fits in self.fits]
        squares = _suffixes(allowed, np.add)
        ends = [0]
        for stage in range(self.chain.num_stages):
            first = ends[-1]
            ends.append(int(np.argmin(allowed[stage][first] + squares[stage + 1])))
        return ends


@dataclass
class _Search:
    """Depth first over where each stage ends, the most promising first, leaving out what cannot beat the best so far.

    With `smallest` the objective is the largest rank's bytes in place of the seconds.
    """

    chain: _Chain
    limit: float
    best: list[int] | None = None  # what it begins with, which fits
    smallest: bool = False
    value: tuple[float, float] = (math.inf, math.inf)
    nodes: int = 0
    _bounds: _Bounds = field(init=False)

    def __post_init__(self) -> None:
        self._bounds = _Bounds(self.chain, self.limit)
        self._sizes = _suffixes([self.chain.stage_bytes(one) for one in range(self.chain.num_stages)], np.maximum)
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


def _climbed(ends: list[int], value: Callable[[list[int]], tuple[float, ...]]) -> list[int]:
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


def _too_small(chain: _Chain, limit: float, least: _Search) -> PlanError:
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


def _sums(values: Sequence[float]) -> Floats:
    return np.array(list(accumulate(values, initial=0.0)))


def _proper(num_blocks: int) -> npt.NDArray[np.bool_]:
    """Return which slices [first, end] hold a block."""
    return np.arange(num_blocks)[:, None] < np.arange(num_blocks + 1)[None, :]


def _suffixes(cost: Sequence[Floats], join: np.ufunc) -> list[Floats]:
    """Return, for every stage and first block, the least joined cost of this stage and those after it."""
    num_blocks = cost[0].shape[0]
    table = [np.where(np.arange(num_blocks + 1) == num_blocks, 0.0, np.inf)]
    for one in reversed(cost):
        best = np.min(join(one, table[0][None, :]), axis=1)
        table.insert(0, np.append(best, np.inf))
    return table
