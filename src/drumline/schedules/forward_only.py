"""Inference: forwards only, nothing stashed.

    4 ranks, 4 stages, 6 microbatches

    rank 0 |F0 F1 F2 F3 F4 F5 .. .. .. |
    rank 1 |.. F0 F1 F2 F3 F4 F5 .. .. |
    rank 2 |.. .. F0 F1 F2 F3 F4 F5 .. |
    rank 3 |.. .. .. F0 F1 F2 F3 F4 F5 |

With several stages per rank, groups of microbatches go round the loop as in interleaved 1F1B.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import Cells, cells
from drumline.schedules.orders import visits
from drumline.schedules.registry import schedule


@schedule("forward-only", summary="inference: forwards only, nothing stashed", stages_per_rank=1, stage_counts="any")
def forward_only(num_ranks: int, *, num_microbatches: int, stages_per_rank: int = 1) -> Iterator[Cells]:
    """Run the forwards in groups, like interleaved schedules."""
    local, microbatches = visits(num_ranks, num_microbatches, stages_per_rank)
    for rank in range(num_ranks):
        yield cells(Op.FORWARD, local * num_ranks + rank, microbatches)
