"""DualPipeV: DualPipe folded in the middle, so that half the ranks hold one copy of every stage in a V.

    4 ranks, 8 stages, 4 microbatches

    rank 0 |F0 F1 F2 F3 .. .. .. f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 b3--- B0--- .. .. B1--- .. .. B2--- .. .. B3--- |
    rank 1 |.. F0 F1 F2 F3 .. f0 .. f1 i0 w0 f2 i1 w1 f3 b2--- B0--- b3--- B1--- .. .. B2--- .. .. B3--- .. .. |
    rank 2 |.. .. F0 F1 F2 f0 F3 f1 .. f2 i0 w0 f3 b1--- B0--- b2--- B1--- b3--- B2--- .. .. B3--- .. .. .. .. |
    rank 3 |.. .. .. F0 f0 F1 f1 F2 f2 F3 f3 b0--- B0--- b1--- B1--- b2--- B2--- b3--- B3--- .. .. .. .. .. .. |

The recipe needs M >= 2P; a smaller M uses part of a larger run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from drumline.schedules.cells import Cells
from drumline.schedules.dualpipe import EightSteps, idle
from drumline.schedules.formulas import idling
from drumline.schedules.registry import schedule


@schedule(
    "dualpipe-v",
    summary="DualPipe in a V: its overlap of F with B, with one copy of the weights",
    stages_per_rank=2,
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: 2 * num_ranks + 1,
    makespan=idling(lambda pace, num_ranks: idle(pace, 2 * num_ranks)),  # like twice as many ranks, folded
    makespan_holds=lambda num_ranks, num_microbatches, stages_per_rank: num_ranks > 2,
    planned_with=(2,),
    suits=lambda num_ranks, num_microbatches, stages_per_rank: num_microbatches >= 2 * num_ranks,
    titan="DualPipeV",
)
def dualpipe_v(num_ranks: int, *, num_microbatches: int) -> Iterator[Cells]:
    """Run the eight steps on every rank, flow 0 down the V and flow 1 up."""
    every = np.arange(max(num_microbatches, 2 * num_ranks))
    for rank in range(num_ranks):
        flows = (rank, every), (2 * num_ranks - 1 - rank, every)
        yield EightSteps(num_ranks, rank, flows).row(num_microbatches)
