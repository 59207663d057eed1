"""The best cut of a chain where every stage has its own times and its own memory: exactly, then by moving boundaries.

Two objectives, by dynamic programming over (stage, first block):

    largest     the largest stage as short as it can be, then a sum over the stages
    step        sum of all stages + (M - 1) x largest stage: a microbatch on its way, and the others behind the slowest

For the second, every length that the largest stage could have is tried, shortest first: within it the shortest sum is a
dynamic programme again. It ends where even the shortest sum of all cannot make up for a longer largest stage.

    best(s, i) = min over j of seconds(s, i..j) + best(s + 1, j),   seconds(s, i..j) <= largest

Where all blocks are equal neither is needed: they are dealt one by one (`dealt`), stages that share a rank included.

What a program makes of a cut only the simulator knows. So from there on a hill is climbed: boundaries are moved for as
long as that is better, by whatever measure.

    2 | 3 | 3 | 1      12.4 ms      one boundary moved by one or two blocks, or two of them by one
    2 | 3 | 2 | 2      12.1 ms      the best neighbour is next, until none is shorter

All neighbours of a cut are measured at once: the simulator times them as columns of one compiled program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

import numpy as np

from drumline.core.simulate.graph import Floats

Counts = tuple[int, ...]
Values = Callable[[Sequence[Counts]], Sequence[Any]]

SLACK = 1e-12  # of the largest stage: seconds are sums in floating point


def suffixes(cost: Sequence[Floats], join: np.ufunc) -> list[Floats]:
    """Return, for every stage and first block, the least joined cost of this stage and those after it."""
    num_blocks = cost[0].shape[0]
    table = [np.where(np.arange(num_blocks + 1) == num_blocks, 0.0, np.inf)]
    for one in reversed(cost):
        best = np.min(join(one, table[0][None, :]), axis=1)
        table.insert(0, np.append(best, np.inf))
    return table


def shortest_largest(seconds: Sequence[Floats], then: Sequence[Floats] | None = None) -> Counts | None:
    """Return how many blocks each stage gets: the largest the shortest, then the sum; None where nothing is allowed.

    `seconds[stage][first, end]` is what the blocks from `first` to `end` take as that stage; infinite is forbidden. The
    sum is that of `then`, tables of the same shape, where given.

    >>> table = np.array([[np.inf, 3, 4], [np.inf, np.inf, 1]])
    >>> shortest_largest([table, table])
    (1, 1)
    """
    largest = float(suffixes(seconds, np.maximum)[0][0])
    return None if largest == np.inf else _shortest_sum(seconds, largest * (1 + SLACK), then)[1]


def shortest_step(seconds: Sequence[Floats], num_microbatches: int) -> Counts | None:
    """Return how many blocks each stage gets: sum + (M - 1) x largest the shortest; None where nothing is allowed."""
    lengths = np.unique(np.concatenate([one[np.isfinite(one)] for one in seconds]))
    least_largest = float(suffixes(seconds, np.maximum)[0][0])
    if least_largest == np.inf:
        return None
    least_sum = float(suffixes(seconds, np.add)[0][0])
    best, found = np.inf, None
    for largest in lengths[lengths >= least_largest * (1 - SLACK)].tolist():
        if least_sum + (num_microbatches - 1) * largest >= best:
            break
        whole, counts = _shortest_sum(seconds, largest * (1 + SLACK))
        if whole + (num_microbatches - 1) * largest < best:
            best, found = whole + (num_microbatches - 1) * largest, counts
    return found


def _shortest_sum(
    seconds: Sequence[Floats], largest: float, then: Sequence[Floats] | None = None
) -> tuple[float, Counts]:
    """Return the shortest sum with no stage above `largest`, and its cut."""
    allowed = [np.where(one <= largest, cost, np.inf) for one, cost in zip(seconds, then or seconds, strict=True)]
    table = suffixes(allowed, np.add)
    ends = [0]
    for stage, one in enumerate(allowed):
        ends.append(int(np.argmin(one[ends[-1]] + table[stage + 1])))
    return float(table[0][0]), tuple(int(one) for one in np.diff(ends))


def dealt(num_blocks: int, owners: Sequence[int], extra: Sequence[float]) -> Counts:
    """Return how many of `num_blocks` equal blocks each stage gets, so that the largest rank is as small as it can be.

    `owners` are the ranks of the stages, `extra` what a stage has besides its blocks, counted in blocks. Each block
    goes to the rank that has least so far, and there to the stage that has least; ties go to the middle.

    >>> dealt(7, [0, 1, 1, 0], [0, 0, 0, 2])
    (2, 2, 2, 1)
    """
    counts = [1] * len(owners)
    middle = (len(owners) - 1) / 2
    stages = [1 + more for more in extra]
    ranks = [0.0] * (max(owners) + 1)
    for stage, owner in enumerate(owners):
        ranks[owner] += stages[stage]
    for _ in range(num_blocks - len(owners)):
        stage = min(range(len(owners)), key=lambda one: (ranks[owners[one]], stages[one], abs(one - middle), one))
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
    """Return the cut that is reached from the best of `starts`; a lesser value is better.

    With `singly` a step tries the moves of two boundaries, which are many, only where no single one is better.

    >>> climb([(1, 4)], lambda many: [abs(one[0] - one[1]) for one in many], rounds=10)
    (2, 3)
    """
    value, best = _least(values, starts)
    alone = singly
    for _ in range(rounds):
        around = list(dict.fromkeys(neighbours(best, reach=reach, alone=alone)))
        nearest = _least(values, around) if around else None
        if nearest is not None and better(nearest[0], value):
            (value, best), alone = nearest, singly
        elif alone:
            alone = False
        else:
            break
    return best


def _least(values: Values, many: Sequence[Counts]) -> tuple[Any, Counts]:
    """Return the least value and its cut; of equal ones the cut whose first stages are the smallest."""
    return min(zip(values(many), many, strict=True))


def neighbours(counts: Counts, *, reach: int = 2, alone: bool = False) -> Iterator[Counts]:
    """Yield the cuts with one boundary moved by up to `reach` blocks, or, unless `alone`, two of them by one."""
    inner = range(1, len(counts))
    steps = [by for far in range(1, reach + 1) for by in (-far, far)]
    moves: list[tuple[tuple[int, int], ...]] = [((at, by),) for at in inner for by in steps]
    if not alone:
        moves += [((at, by), (to, also)) for at, to in combinations(inner, 2) for by in (-1, 1) for also in (-1, 1)]
    ends = ends_of(counts)
    for move in moves:
        moved = list(ends)
        for at, by in move:
            moved[at] += by
        if all(i < j for i, j in pairwise(moved)):
            yield tuple(j - i for i, j in pairwise(moved))


def ends_of(counts: Sequence[int]) -> list[int]:
    """Return where the stages end, from 0 on.

    >>> ends_of((2, 3))
    [0, 2, 5]
    """
    return list(accumulate(counts, initial=0))


def even_cut(num_blocks: int, num_stages: int) -> Counts:
    """Return the cut whose stages have about as many blocks each.

    >>> even_cut(5, 2)
    (2, 3)
    """
    ends = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    return tuple(j - i for i, j in pairwise(ends))


def every_cut(num_blocks: int, num_stages: int) -> list[Counts]:
    """Return every cut of so many blocks.

    >>> every_cut(3, 2)
    [(1, 2), (2, 1)]
    """
    inner = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(j - i for i, j in pairwise((0, *one, num_blocks))) for one in inner]
