"""Documents of unequal length put together: into full rows, into microbatches that cost alike, into buckets."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_CELLS = 512  # equal shares of all tokens, at whose lengths buckets may end


def packed(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of at most `capacity` tokens, each a list of places: the longest first, into the fullest that fits.

    >>> packed([3, 5, 4, 2, 2], 8)
    [[1, 0], [2, 3, 4]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in each row, the least first
    for at in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect.bisect_left(room, (lengths[at], -1))
        left, row = room.pop(place) if place < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(at)
        if left > lengths[at]:
            bisect.insort(room, (left - lengths[at], row))
    return rows


def alike(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return `count` groups that cost alike, each padded to its longest; only one that is long by itself costs more.

    Neighbours in length go together, so that little is padded: short ones many in a group, long ones few.

    >>> alike([8, 2, 4, 2, 4, 2, 2], 3)
    [[0], [2, 4], [1, 3, 5, 6]]
    """
    order = sorted(range(len(lengths)), key=lambda number: (-lengths[number], number))
    ordered = [max(lengths[at], 1) for at in order]
    low, high = 1, ordered[0] * len(ordered)
    while low < high:
        middle = (low + high) // 2
        if len(_within(ordered, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    # Groups of which more are wanted: halve the largest.
    heap = [(-ordered[start] * (stop - start), start, stop) for start, stop in _within(ordered, low)]
    heapq.heapify(heap)
    singles: list[tuple[int, int, int]] = []
    while len(heap) + len(singles) < count and heap:
        cost, start, stop = heapq.heappop(heap)
        if stop - start == 1:
            singles.append((cost, start, stop))
            continue
        middle = (start + stop) // 2
        for a, b in ((start, middle), (middle, stop)):
            heapq.heappush(heap, (-ordered[a] * (b - a), a, b))
    return [order[start:stop] for _, start, stop in sorted(heap + singles, key=lambda entry: entry[1])]


def _within(ordered: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the fewest runs of neighbours, longest first, of one or of at most `most` padded tokens each."""
    runs, start = [], 0
    while start < len(ordered):
        stop = min(start + max(most // ordered[start], 1), len(ordered))
        runs.append((start, stop))
        start = stop
    return runs


def chosen_buckets(histogram: NDArray[np.int64], most: int, *, step: int = 1, enough: float = 0.0) -> tuple[int, ...]:
    """Return at most `most` lengths that pad as little as possible; the last one is the longest.

    `histogram[n]` says how many rows have the length n. Lengths are multiples of `step`, but for the longest. Fewer are
    returned where they pad a share of at most `enough`.

    >>> chosen_buckets(np.bincount([3, 3, 3, 10, 16]), 2)
    (3, 16)
    >>> chosen_buckets(np.bincount([3, 3, 3, 10, 16]), 9), chosen_buckets(np.bincount([9, 10, 10]), 9, enough=0.05)
    ((3, 10, 16), (10,))
    """
    longest = len(histogram) - 1
    ends = _ends(histogram, step)
    rows = np.cumsum(histogram)[ends]  # up to each length
    rows[0] = 0  # rows without a token are padded too
    # What a bucket costs that begins behind one length and ends with another.
    costs = np.where(ends[:, None] < ends[None, :], (rows[None, :] - rows[:, None]) * ends[None, :], np.inf)
    real = float(np.dot(np.arange(longest + 1), histogram))
    best = np.where(ends == 0, 0.0, np.inf)
    before: list[NDArray[np.int64]] = []  # for each number of buckets, where the one before the last ends
    while len(before) < min(most, len(ends) - 1) and best[-1] * (1.0 - enough) > real:
        total = best[:, None] + costs
        before.append(total.argmin(axis=0))
        best = total.min(axis=0)
    lengths_chosen, at = [], len(ends) - 1
    for array in reversed(before):
        lengths_chosen.append(int(ends[at]))
        at = int(array[at])
    return tuple(reversed(lengths_chosen))


def _ends(histogram: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Return 0 and the lengths at which buckets may end: those that part all tokens into many equal shares."""
    longest = len(histogram) - 1
    tokens = np.cumsum(histogram * np.arange(longest + 1))
    shares = np.linspace(0.0, float(tokens[-1]), _CELLS + 1)[1:]
    ends = -(-np.searchsorted(tokens, shares) // step) * step
    ends_left: NDArray[np.int64] = np.unique(np.concatenate([[0], np.minimum(ends, longest), [longest]])).astype(
        np.int64
    )
    return ends_left
