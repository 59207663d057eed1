"""Documents of unequal length put together: into full rows, into microbatches that cost alike, into buckets."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Choice = tuple[float, tuple[int, ...]]  # padded tokens, and the buckets that lead to them


def packed(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Return rows of at most `capacity` tokens, each a list of places: the longest first, into the fullest that fits.

    >>> packed([3, 5, 4, 2, 2], 8)
    [[1, 0], [2, 3, 4]]
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # what is left in each row, the least first
    for at in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        found = bisect.bisect_left(room, (lengths[at], -1))
        left, row = room.pop(found) if found < len(room) else (capacity, len(rows))
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
    order = sorted(range(len(lengths)), key=lambda one: (-lengths[one], one))
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
    return [order[start:stop] for _, start, stop in sorted(heap + singles, key=lambda one: one[1])]


def _within(ordered: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return the fewest runs of neighbours, longest first, of one or of at most `most` padded tokens each."""
    runs, start = [], 0
    while start < len(ordered):
        stop = min(start + max(most // ordered[start], 1), len(ordered))
        runs.append((start, stop))
        start = stop
    return runs


def chosen_buckets(histogram: NDArray[np.int64], most: int, *, step: int) -> tuple[int, ...]:
    """Return at most `most` lengths, multiples of `step`, that pad as little as possible; the last holds the longest.

    `histogram[n]` says how many rows have the length n.

    >>> chosen_buckets(np.bincount([3, 3, 3, 10, 16]), 2, step=1)
    (3, 16)
    """
    longest = len(histogram) - 1
    ends = list(range(step, longest + step, step))
    cells = np.zeros(len(ends) + 1, dtype=np.int64)  # rows up to each length
    for at, end in enumerate(ends):
        cells[at + 1] = cells[at] + int(histogram[end - step + 1 : end + 1].sum())
    cells[1:] += int(histogram[0])
    best: list[Choice] = [(0.0 if not at else float("inf"), ()) for at in range(len(ends) + 1)]
    for _ in range(most):
        found = [min(_last_buckets(best, cells, ends, at)) for at in range(len(ends) + 1)]
        best = [min(one, other) for one, other in zip(best, found, strict=True)]
    return best[-1][1]


def _last_buckets(best: Sequence[Choice], cells: NDArray[np.int64], ends: Sequence[int], at: int) -> list[Choice]:
    """Return the costs of all choices of which the last bucket is `ends[at - 1]`."""
    if not at:
        return [best[0]]
    end = ends[at - 1]
    return [(best[before][0] + float(cells[at] - cells[before]) * end, (*best[before][1], end)) for before in range(at)]
