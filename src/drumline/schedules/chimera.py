"""Chimera (arXiv 2107.06925): two opposed 1F1B pipelines that fill each other's bubbles.

    4 ranks, 4 stages, 4 microbatches

    rank 0 |F0 F1 .. f2 b2 f3 b3 B0 .. B1 |
    rank 1 |.. F0 f2 F1 f3 b2 B0 b3 B1 .. |
    rank 2 |.. f2 F0 f3 F1 B0 b2 B1 b3 .. |
    rank 3 |f2 f3 .. F0 B0 F1 B1 b2 .. b3 |

Every stage has two copies, on ranks r and P-1-r; half the microbatches go down, half up. In slots of one forward or one
backward, a unit of P microbatches uses each of 2P slots once on every rank, so units follow each other without a gap:

    on rank r, number n of its direction, q ranks from where it entered:   F at q + 2n,   B at 2P - 1 - q + 2n
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from drumline.core.action import Op
from drumline.schedules.cells import Cells, cells, joined
from drumline.schedules.registry import schedule


@schedule("chimera", summary="two opposed 1F1B: half the bubble at small M; twice the weights", even_ranks=True)
def chimera(num_ranks: int, *, num_microbatches: int) -> Iterator[Cells]:
    """Merge both directions by slot, then exchange the gradients of the two copies."""
    num_down, m = (num_microbatches + 1) // 2, np.arange(num_microbatches)
    unit, inside = np.divmod(np.where(m < num_down, m, m - num_down), num_ranks // 2)
    start = 2 * num_ranks * unit + 2 * inside
    for rank in range(num_ranks):
        stage = np.where(m < num_down, rank, num_ranks - 1 - rank)
        row = joined(cells(op, stage, m) for op in (Op.FORWARD, Op.BACKWARD))
        slots = np.concatenate((start + stage, start + 2 * num_ranks - 1 - stage))
        yield joined((row[np.argsort(slots, kind="stable")], cells(Op.REDUCE_GRAD, np.unique(stage))))
