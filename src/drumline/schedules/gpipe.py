"""GPipe (arXiv 1811.06965): all forwards, then all backwards.

    4 ranks, 4 stages, 5 microbatches

    rank 0 |F0 F1 F2 F3 F4 .. .. .. .. .. .. .. .. .. B0--- B1--- B2--- B3--- B4--- |
    rank 1 |.. F0 F1 F2 F3 F4 .. .. .. .. .. .. B0--- B1--- B2--- B3--- B4--- .. .. |
    rank 2 |.. .. F0 F1 F2 F3 F4 .. .. .. B0--- B1--- B2--- B3--- B4--- .. .. .. .. |
    rank 3 |.. .. .. F0 F1 F2 F3 F4 B0--- B1--- B2--- B3--- B4--- .. .. .. .. .. .. |

Every microbatch is stashed until its backward. The paper recomputes activations to reduce that cost:
`Costs(recompute=True)`.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import Turns
from drumline.schedules.formulas import fill_and_drain, flush_bubble
from drumline.schedules.registry import schedule


@schedule(
    "gpipe",
    summary="all forwards, then all backwards; the simplest, but stashes every microbatch",
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: num_microbatches,
    makespan=fill_and_drain,
    bubble=flush_bubble,
    formula_in_slices=True,
)
def gpipe(num_ranks: int, *, num_microbatches: int) -> Iterator[Turns]:
    """Run all forwards, then all backwards."""
    for rank in range(num_ranks):
        yield Turns().add(num_microbatches, (rank, Op.FORWARD)).add(num_microbatches, (rank, Op.BACKWARD))
