"""1F1B with a flush (PipeDream-Flush, arXiv 2104.04473): backwards start as soon as they can.

    4 ranks, 4 stages, 6 microbatches

    rank 0 |F0 F1 F2 F3 .. .. .. .. .. .. B0--- F4 B1--- F5 B2--- .. B3--- .. B4--- .. B5--- |
    rank 1 |.. F0 F1 F2 .. .. .. .. B0--- F3 B1--- F4 B2--- F5 B3--- .. B4--- .. B5--- .. .. |
    rank 2 |.. .. F0 F1 .. .. B0--- F2 B1--- F3 B2--- F4 B3--- F5 B4--- .. B5--- .. .. .. .. |
    rank 3 |.. .. .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- F4 B4--- F5 B5--- .. .. .. .. .. .. |

Rank r runs P-1-r forwards ahead, then alternates one forward and one backward. It takes as long as GPipe, but stashes
min(M, P-r) microbatches instead of M.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.schedules.cells import Turns
from drumline.schedules.formulas import Paces, fill_and_drain, flush_bubble
from drumline.schedules.orders import alternating
from drumline.schedules.registry import schedule


def _makespan(paces: Paces) -> float:
    """Return GPipe's time, plus what a rank waits for messages: it has no other microbatch to work on meanwhile."""
    return fill_and_drain(paces) + 2 * paces.hops * paces.num_microbatches / paces.num_ranks


@schedule(
    "1f1b",
    summary="alternates one forward and one backward; GPipe's time with a stash of at most P",
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: num_ranks - rank,
    makespan=_makespan,
    bubble=flush_bubble,
    planned_with=(1,),
    titan="1F1B",
    in_megatron=True,
    formula_in_slices=True,
)
def one_f_one_b(num_ranks: int, *, num_microbatches: int) -> Iterator[Turns]:
    """Run P-1-r forwards ahead on rank r, then alternate one forward and one backward."""
    for rank in range(num_ranks):
        yield alternating(rank, num_microbatches, ahead=num_ranks - 1 - rank)
