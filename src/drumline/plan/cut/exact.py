"""The best cut of a chain where every stage has its own times and its own memory, exactly.

Two objectives, by dynamic programming over (stage, first block):

    largest     the largest stage as short as it can be
    step        sum of all stages + (M - 1) x largest stage: a microbatch on its way, and the others behind the slowest

For the second, every length that the largest stage could have is tried, shortest first: within it the shortest sum is a
dynamic programme again. It ends where even the shortest sum of all cannot make up for a longer largest stage.

    best(s, i) = min over j of seconds(s, i..j) + best(s + 1, j),   seconds(s, i..j) <= largest
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drumline.core.simulate.graph import Floats
from drumline.plan.cut.bounds import SLACK, suffixes


def shortest_largest(seconds: Sequence[Floats]) -> tuple[int, ...] | None:
    """Return how many blocks each stage gets: the largest the shortest, then the sum; None where nothing is allowed.

    `seconds[stage][first, end]` is what the blocks from `first` to `end` take as that stage; infinite is forbidden.

    >>> table = np.array([[np.inf, 3, 4], [np.inf, np.inf, 1]])
    >>> shortest_largest([table, table])
    (1, 1)
    """
    largest = float(suffixes(seconds, np.maximum)[0][0])
    return None if largest == np.inf else _shortest_sum(seconds, largest * (1 + SLACK))[1]


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


def _shortest_sum(seconds: Sequence[Floats], largest: float) -> tuple[float, tuple[int, ...]]:
    """Return the shortest sum with no stage above `largest`, and its cut."""
    allowed = [np.where(one <= largest, one, np.inf) for one in seconds]
    table = suffixes(allowed, np.add)
    ends = [0]
    for stage, one in enumerate(allowed):
        ends.append(int(np.argmin(one[ends[-1]] + table[stage + 1])))
    return float(table[0][0]), tuple(int(one) for one in np.diff(ends))
