"""The best cut of a chain where every stage has its own times and its own memory, exactly.

Two objectives, by dynamic programming over (stage, first block):

    largest     the largest stage as short as it can be, then a sum over the stages
    step        sum of all stages + (M - 1) x largest stage: a microbatch on its way, and the others behind the slowest

For the second, every length that the largest stage could have is tried, shortest first: within it the shortest sum is a
dynamic programme again. It ends where even the shortest sum of all cannot make up for a longer largest stage.

    best(s, i) = min over j of seconds(s, i..j) + best(s + 1, j),   seconds(s, i..j) <= largest

Where all blocks are equal neither is needed: they are dealt one by one (`dealt`), stages that share a rank included.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drumline.core.simulate.graph import Floats

SLACK = 1e-12  # of the largest stage: seconds are sums in floating point


def suffixes(cost: Sequence[Floats], join: np.ufunc) -> list[Floats]:
    """Return, for every stage and first block, the least joined cost of this stage and those after it."""
    num_blocks = cost[0].shape[0]
    table = [np.where(np.arange(num_blocks + 1) == num_blocks, 0.0, np.inf)]
    for one in reversed(cost):
        best = np.min(join(one, table[0][None, :]), axis=1)
        table.insert(0, np.append(best, np.inf))
    return table


def shortest_largest(seconds: Sequence[Floats], then: Sequence[Floats] | None = None) -> tuple[int, ...] | None:
    """Return how many blocks each stage gets: the largest the shortest, then the sum; None where nothing is allowed.

    `seconds[stage][first, end]` is what the blocks from `first` to `end` take as that stage; infinite is forbidden. The
    sum is that of `then`, tables of the same shape, where given.

    >>> table = np.array([[np.inf, 3, 4], [np.inf, np.inf, 1]])
    >>> shortest_largest([table, table])
    (1, 1)
    """
    largest = float(suffixes(seconds, np.maximum)[0][0])
    return None if largest == np.inf else _shortest_sum(seconds, largest * (1 + SLACK), then)[1]


def shortest_step(seconds: Sequence[Floats], num_microbatches: int) -> tuple[int, ...] | None:
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
) -> tuple[float, tuple[int, ...]]:
    """Return the shortest sum with no stage above `largest`, and its cut."""
    allowed = [np.where(one <= largest, cost, np.inf) for one, cost in zip(seconds, then or seconds, strict=True)]
    table = suffixes(allowed, np.add)
    ends = [0]
    for stage, one in enumerate(allowed):
        ends.append(int(np.argmin(one[ends[-1]] + table[stage + 1])))
    return float(table[0][0]), tuple(int(one) for one in np.diff(ends))


def dealt(num_blocks: int, owners: Sequence[int], extra: Sequence[float]) -> tuple[int, ...]:
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
