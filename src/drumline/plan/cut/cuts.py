"""The best cut of a chain when every stage has its own times and memory: exactly, then by moving boundaries.

There are two objectives, solved by dynamic programming over (stage, first block):

    largest     shortest largest stage, then the smallest sum over the stages
    step        sum of all stages + (M - 1) x largest stage: one microbatch's path, and the others behind the slowest

For the second, every possible length of the largest stage is tried, shortest first, each with dynamic programming for
the shortest sum. The search ends when even the shortest sum of all cannot make up for a longer largest stage.

    best(s, i) = min over j of seconds(s, i..j) + best(s + 1, j),   seconds(s, i..j) <= largest

If all blocks are equal, neither is needed: they are assigned one by one (`dealt`), even if stages share a rank.

Only the simulator knows what a program makes of a cut. So hill climbing follows: boundaries move as long as that
improves any given measure.

    2 | 3 | 3 | 1      12.4 ms      move one boundary by one or two blocks, or a block to any other stage
    2 | 3 | 2 | 2      12.1 ms      continue from the best neighbour, until none is shorter

All neighbours of a cut are measured at once: the simulator times them as columns of one compiled program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np

from drumline.core.graph import Floats, Ints

Counts = tuple[int, ...]
Values = Callable[[Sequence[Counts]], Sequence[Any]]

SLACK = 1e-12  # relative to the largest stage: seconds are floating-point sums


def suffixes(cost: Sequence[Floats], join: np.ufunc) -> list[Floats]:
    """Return, for every stage and first block, the smallest joined cost of this stage and those after it."""
    num_blocks = cost[0].shape[0]
    table = [np.where(np.arange(num_blocks + 1) == num_blocks, 0.0, np.inf)]
    for array in reversed(cost):
        best = np.min(join(array, table[0][None, :]), axis=1)
        table.insert(0, np.append(best, np.inf))
    return table


def shortest_largest(seconds: Sequence[Floats], then: Sequence[Floats] | None = None) -> Counts | None:
    """Return the blocks per stage with the shortest largest stage, then the smallest sum; None if no cut is allowed.

    `seconds[stage][first, end]` is the cost of the blocks from `first` to `end` as that stage; infinity forbids it. The
    sum is over `then`, tables of the same shape, if given.

    >>> table = np.array([[np.inf, 3, 4], [np.inf, np.inf, 1]])
    >>> shortest_largest([table, table])
    (1, 1)
    """
    largest = float(suffixes(seconds, np.maximum)[0][0])
    return None if largest == np.inf else _shortest_sum(seconds, largest * (1 + SLACK), then)[1]


def shortest_step(seconds: Sequence[Floats], num_microbatches: int) -> Counts | None:
    """Return the blocks per stage that minimise sum + (M - 1) x largest; None if no cut is allowed."""
    least_largest = float(suffixes(seconds, np.maximum)[0][0])
    if least_largest == np.inf:
        return None
    least_sum = float(suffixes(seconds, np.add)[0][0])
    whole, numbers = _shortest_sum(seconds, least_largest * (1 + SLACK))
    best, tried = whole + (num_microbatches - 1) * least_largest, least_largest
    lengths = np.concatenate([duration[np.isfinite(duration)] for duration in seconds])
    for largest in np.unique(lengths[least_sum + (num_microbatches - 1) * lengths < best]).tolist():
        if largest <= tried * (1 + SLACK):
            continue
        if least_sum + (num_microbatches - 1) * largest >= best:
            break
        whole, counts = _shortest_sum(seconds, largest * (1 + SLACK))
        tried = largest
        if whole + (num_microbatches - 1) * largest < best:
            best, numbers = whole + (num_microbatches - 1) * largest, counts
    return numbers


def _shortest_sum(
    seconds: Sequence[Floats], largest: float, then: Sequence[Floats] | None = None
) -> tuple[float, Counts]:
    """Return the smallest sum with no stage above `largest`, and its cut."""
    allowed = [np.where(length <= largest, cost, np.inf) for length, cost in zip(seconds, then or seconds, strict=True)]
    table = suffixes(allowed, np.add)
    ends = [0]
    for stage, length in enumerate(allowed):
        ends.append(int(np.argmin(length[ends[-1]] + table[stage + 1])))
    return float(table[0][0]), tuple(int(length) for length in np.diff(ends))


def shared_cut(sums: Sequence[float] | Floats, shares: Sequence[float]) -> Counts:
    """Return the cut in which each stage's share of the seconds is nearest to these shares.

    `sums` are the prefix sums of the blocks' seconds.

    >>> shared_cut([0, 1, 2, 3, 4, 5, 6, 7, 8], [1.0, 0.5, 0.5])
    (4, 2, 2)
    """
    seconds = np.asarray(sums) - sums[0]
    targets = np.cumsum(shares)[:-1] / np.sum(shares) * seconds[-1]
    ends = [0]
    for at, target in enumerate(targets.tolist(), start=1):
        nearest = int(np.abs(seconds - target).argmin())
        ends.append(min(max(nearest, ends[-1] + 1), len(seconds) - 1 - (len(shares) - at)))
    return tuple(np.diff([*ends, len(seconds) - 1]).tolist())


def dealt(num_blocks: int, owners: Sequence[int], extra: Sequence[float], *, late: bool = False) -> Counts:
    """Return how many of `num_blocks` equal blocks each stage gets, so that the largest rank is as small as possible.

    `owners` are the ranks of the stages, `extra` what a stage has besides its blocks, in blocks. Each block goes to the
    rank with the least work so far, and there to the stage with the least; ties go to the middle. With `late`, they go
    to the latest of a rank's stages: interleaved ranks wait for each other in their first ones.

    >>> dealt(7, [0, 1, 1, 0], [0, 0, 0, 2])
    (2, 2, 2, 1)
    >>> dealt(6, [0, 1, 0, 1], [0, 0, 0, 0]), dealt(6, [0, 1, 0, 1], [0, 0, 0, 0], late=True)
    ((1, 2, 2, 1), (1, 1, 2, 2))
    """
    counts = [1] * len(owners)
    middle, num_seen = (len(owners) - 1) / 2, [0] * (max(owners) + 1)
    ties = []
    for stage, owner in enumerate(owners):
        ties.append((-num_seen[owner] if late else 0, abs(stage - middle), stage))
        num_seen[owner] += 1
    stages = [1 + more for more in extra]
    ranks = [0.0] * (max(owners) + 1)
    for stage, owner in enumerate(owners):
        ranks[owner] += stages[stage]
    for _ in range(num_blocks - len(owners)):
        stage = min(range(len(owners)), key=lambda number: (ranks[owners[number]], stages[number], ties[number]))
        counts[stage] += 1
        stages[stage] += 1
        ranks[owners[stage]] += 1
    return tuple(counts)


def climb(
    starts: Sequence[Counts],
    values: Values,
    *,
    rounds: int,
    reach: int = 2,
    singly: bool = False,
    better: Callable[[Any, Any], bool] = operator.lt,
) -> Counts:
    """Return the cut reached by hill climbing from the best of `starts`; a smaller value is better.

    With `singly`, a step tries moves between stages far apart, which are many, only if no other move is better.

    >>> climb([(1, 4)], lambda many: [abs(value[0] - value[1]) for value in many], rounds=10)
    (2, 3)
    """
    value, best = _least(values, starts)
    alone = singly
    for _ in range(rounds):
        around = neighbours(best, reach=reach, alone=alone)
        nearest = _least(values, around) if around else None
        if nearest is not None and better(nearest[0], value):
            (value, best), alone = nearest, singly
        elif alone:
            alone = False
        else:
            break
    return best


def _least(values: Values, many: Sequence[Counts]) -> tuple[Any, Counts]:
    """Return the smallest value and its cut; in a tie, the cut with the smallest first stages."""
    return min(zip(values(many), many, strict=True))


def neighbours(counts: Counts, *, reach: int = 2, alone: bool = False) -> list[Counts]:
    """Return the cuts with one boundary moved by up to `reach` blocks, or, unless `alone`, a block between any stages.

    A block that goes from one stage to another moves all boundaries between them by one.

    >>> neighbours((2, 1, 2), reach=1)
    [(1, 2, 2), (2, 2, 1), (1, 1, 3), (3, 1, 1)]
    """
    ends = np.array(ends_of(counts))
    moved = np.diff(ends + _boundary_moves(len(counts), reach, alone), axis=1)
    return list(map(tuple, moved[(moved > 0).all(axis=1)].tolist()))


@cache
def _boundary_moves(num_stages: int, reach: int, alone: bool) -> Ints:
    """Return by how many blocks each move shifts the ends of the stages, one row for each move."""
    stages, boundaries = range(num_stages), range(1, num_stages)
    moves = [(range(at, at + 1), by) for far in range(1, reach + 1) for at in boundaries for by in (-far, far)]
    if not alone:  # from one stage to another, all boundaries between them move
        moves += [(range(a + 1, b + 1), by) for a in stages for b in stages[a + 2 :] for by in (-1, 1)]
    rows = np.zeros((len(moves), num_stages + 1), dtype=np.int64)
    for row, (between, by) in zip(rows, moves, strict=True):
        row[list(between)] = by
    return rows


def ends_of(counts: Sequence[int]) -> list[int]:
    """Return where the stages end, starting with 0.

    >>> ends_of((2, 3))
    [0, 2, 5]
    """
    return list(accumulate(counts, initial=0))


def even_cut(num_blocks: int, num_stages: int) -> Counts:
    """Return the cut whose stages have about the same number of blocks.

    >>> even_cut(5, 2)
    (2, 3)
    """
    ends = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    return tuple(j - i for i, j in pairwise(ends))


def every_cut(num_blocks: int, num_stages: int) -> list[Counts]:
    """Return every cut of this many blocks.

    >>> every_cut(3, 2)
    [(1, 2), (2, 1)]
    """
    inner = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(j - i for i, j in pairwise((0, *entry, num_blocks))) for entry in inner]
