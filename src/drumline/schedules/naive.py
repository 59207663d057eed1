"""Model parallelism without pipelining: only one microbatch at a time.

    4 ranks, 4 stages, 2 microbatches

    rank 0 |F0 .. .. .. .. .. .. .. .. .. B0--- F1 .. .. .. .. .. .. .. .. .. B1--- |
    rank 1 |.. F0 .. .. .. .. .. .. B0--- .. .. .. F1 .. .. .. .. .. .. B1--- .. .. |
    rank 2 |.. .. F0 .. .. .. B0--- .. .. .. .. .. .. F1 .. .. .. B1--- .. .. .. .. |
    rank 3 |.. .. .. F0 B0--- .. .. .. .. .. .. .. .. .. F1 B1--- .. .. .. .. .. .. |

All other ranks wait meanwhile: with P ranks, (P-1)/P of the time is bubble.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import Turns
from drumline.schedules.formulas import Paces
from drumline.schedules.registry import schedule


def _makespan(paces: Paces) -> float:
    """Return the time of every rank for every microbatch, plus the hops there and back."""
    return paces.num_microbatches * (sum(pace.count * pace.total for pace in paces.each) + 2 * paces.hops)


@schedule(
    "naive",
    summary="one microbatch at a time: the baseline for pipelining",
    baseline=True,
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: 1,
    makespan=_makespan,
)
def naive(num_ranks: int, *, num_microbatches: int) -> Iterator[Turns]:
    """Run F then B of every microbatch before the next one starts."""
    for rank in range(num_ranks):
        yield Turns().add(num_microbatches, (rank, Op.FORWARD), (rank, Op.BACKWARD))
