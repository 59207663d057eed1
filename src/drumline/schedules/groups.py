"""Microbatches in groups: the order in which looped schedules visit their local stages.

A rank with v stages runs a group of about P microbatches through its first stage, then through its second, and so on,
before the next group: by then the group's first microbatch has come round the loop.

    P = 2, v = 2, M = 4     rank 0:  0F0 0F1 2F0 2F1 | 0F2 0F3 2F2 2F3
"""

from __future__ import annotations

from collections.abc import Iterator


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return the sizes of the groups: as many as have P microbatches each, the rest spread over the first ones.

    A group of fewer than P would let its first microbatch come round too late; M < P is one group of M.

    >>> group_sizes(4, 8), group_sizes(4, 10), group_sizes(4, 11), group_sizes(4, 3)
    ([4, 4], [5, 5], [6, 5], [3])
    """
    count = max(1, num_microbatches // num_ranks)
    size, rest = divmod(num_microbatches, count)
    return [size + 1] * rest + [size] * (count - rest)


def visits(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Iterator[tuple[int, int]]:
    """Yield (local stage, microbatch) in the order of the forwards; backwards visit the local stages in reverse.

    >>> list(visits(2, 2, 2))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    first = 0
    for size in group_sizes(num_ranks, num_microbatches):
        for local in range(stages_per_rank):
            for m in range(first, first + size):
                yield local, m
        first += size
