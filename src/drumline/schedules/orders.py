"""Orders that recipes share: alternating and grouped.

When alternating, forwards run ahead of the backwards, and weight halves, if any, follow later.

Looped schedules visit their local stages with groups of microbatches. A rank with v stages runs a group of about P
microbatches through its first stage, then through its second, and so on, before the next group. By then the first
microbatch of the group has come round the loop.

    P = 2, v = 2, M = 4     rank 0:  0F0 0F1 2F0 2F1 | 0F2 0F3 2F2 2F3

No action depends on another microbatch, so removing microbatches from a legal program leaves a legal program.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from drumline.core.action import Op
from drumline.core.graph import Ints, Number
from drumline.schedules.cells import Turns


def alternating(stage: int, num_microbatches: int, *, ahead: int) -> Turns:
    """Alternate one stage's forwards and backwards, with forwards `ahead` microbatches ahead.

    >>> list(alternating(0, 3, ahead=1))
    [0F0, 0F1, 0B0, 0F2, 0B1, 0B2]
    """
    first = min(ahead, num_microbatches)
    forward, backward = (stage, Op.FORWARD), (stage, Op.BACKWARD)
    return Turns().add(first, forward).add(num_microbatches - first, forward, backward).add(first, backward)


def delayed_weights(stage: int, num_microbatches: int, *, ahead: int, delay: int) -> Turns:
    """Alternate one stage's F and I, with F `ahead` microbatches ahead and W `delay` behind."""
    first = min(ahead, num_microbatches)
    row = Turns().add(first, (stage, Op.FORWARD))
    # The turns in which each op has something to run, from and up to.
    turns = {
        Op.FORWARD: (0, num_microbatches - first),
        Op.BACKWARD_INPUT: (0, num_microbatches),
        Op.BACKWARD_WEIGHT: (delay, num_microbatches + delay),
    }
    for low, high in pairwise(sorted({bound for bounds in turns.values() for bound in bounds})):
        row.add(high - low, *((stage, op) for op, (begin, end) in turns.items() if begin <= low < end))
    return row


def group_sizes(num_ranks: int, num_microbatches: int) -> list[int]:
    """Return group sizes: as many groups of P as possible, with the rest spread over the first ones.

    In a group of fewer than P, the first microbatch would come round too late; M < P is one group of M.

    >>> group_sizes(4, 8), group_sizes(4, 10), group_sizes(4, 11), group_sizes(4, 3)
    ([4, 4], [5, 5], [6, 5], [3])
    """
    count = max(1, num_microbatches // num_ranks)
    size, rest = divmod(num_microbatches, count)
    return [size + 1] * rest + [size] * (count - rest)


def visits(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> tuple[Ints, Ints]:
    """Return local stages and microbatches in forward order; backwards visit the local stages in reverse.

    >>> [column.tolist() for column in visits(2, 2, 2)]
    [[0, 0, 1, 1], [0, 1, 0, 1]]
    """
    sizes = np.array(group_sizes(num_ranks, num_microbatches), dtype=Number)
    runs = np.repeat(sizes, stages_per_rank)  # a run for each group and local stage
    local = np.repeat(np.tile(np.arange(stages_per_rank, dtype=Number), len(sizes)), runs)
    first = np.repeat(np.cumsum(sizes, dtype=Number) - sizes, stages_per_rank)
    return local, np.arange(len(local), dtype=Number) + np.repeat(first - (np.cumsum(runs, dtype=Number) - runs), runs)
