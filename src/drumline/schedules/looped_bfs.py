"""Breadth-first pipelining (arXiv 2211.05953): all microbatches of one local stage before the next local stage.

    2 ranks, 4 stages, 4 microbatches

    rank 0 |F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- |
    rank 1 |.. F0 F1 F2 F3 f0 f1 f2 f3 b0--- b1--- b2--- b3--- B0--- B1--- B2--- B3--- .. .. |

It has the bubble of interleaved 1F1B and the stash of GPipe. It uses each stage's parameters in one go, which suits
sharded data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import Turns
from drumline.schedules.formulas import fill_and_drain, flush_bubble
from drumline.schedules.registry import schedule


@schedule(
    "looped-bfs",
    summary="GPipe over v stages per rank: 1/v of the bubble, each stage's weights gathered once",
    stages_per_rank=2,
    stage_counts="any",
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: num_microbatches * stages_per_rank,
    makespan=fill_and_drain,
    makespan_holds=lambda num_ranks, num_microbatches, stages_per_rank: num_microbatches >= num_ranks,
    bubble=flush_bubble,
    formula_in_slices=True,
)
def looped_bfs(num_ranks: int, *, num_microbatches: int, stages_per_rank: int = 2) -> Iterator[Turns]:
    """Run every local stage's forwards, then every local stage's backwards in reverse."""
    for rank in range(num_ranks):
        stages, row = range(rank, num_ranks * stages_per_rank, num_ranks), Turns()
        for stage in stages:
            row.add(num_microbatches, (stage, Op.FORWARD))
        for stage in reversed(stages):
            row.add(num_microbatches, (stage, Op.BACKWARD))
        yield row
