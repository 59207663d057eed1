"""Interleaved 1F1B (arXiv 2104.04473): several stages per rank, assigned round-robin; reduces the bubble v-fold.

    2 ranks, 4 stages, 4 microbatches

    rank 0 |F0 F1 f0 f1 F2 .. b0--- F3 b1--- f2 B0--- f3 B1--- .. b2--- .. b3--- B2--- B3--- |
    rank 1 |.. F0 F1 f0 b0--- f1 b1--- F2 B0--- F3 B1--- f2 b2--- f3 b3--- B2--- B3--- .. .. |

Rank r runs 2(P-1-r) + (v-1)P forwards ahead, then alternates one forward and one backward. Megatron requires M to be a
multiple of P; here the groups of microbatches stretch to fit any M.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import InTurn, Lanes, cells
from drumline.schedules.formulas import fill_and_drain, flush_bubble
from drumline.schedules.orders import group_sizes, visits
from drumline.schedules.registry import schedule


def _peak_pairs(rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Return the number of forwards that a rank runs ahead, plus the one whose backward comes next."""
    return (stages_per_rank - 1) * num_ranks + 2 * (num_ranks - 1 - rank) + 1


@schedule(
    "interleaved-1f1b",
    summary="1F1B over v stages per rank: 1/v of the bubble, more memory and v times the messages",
    stages_per_rank=2,
    stage_counts="any",
    peak_pairs=_peak_pairs,
    makespan=fill_and_drain,
    makespan_holds=lambda num_ranks, num_microbatches, stages_per_rank: num_microbatches > num_ranks,
    bubble=flush_bubble,
    planned_with=(2, 3, 4, 6, 8),
    suits=lambda num_ranks, num_microbatches, stages_per_rank: (
        stages_per_rank > 1 and num_microbatches % num_ranks == 0
    ),
    titan="Interleaved1F1B",
    in_megatron=True,
    formula_in_slices=True,
)
def interleaved_1f1b(num_ranks: int, *, num_microbatches: int, stages_per_rank: int = 2) -> Iterator[InTurn]:
    """Alternate the grouped forwards and backwards."""
    local, microbatches = visits(num_ranks, num_microbatches, stages_per_rank)
    forwards = cells(Op.FORWARD, local * num_ranks, microbatches)
    backwards = cells(Op.BACKWARD, (stages_per_rank - 1 - local) * num_ranks, microbatches)
    round_trip = (stages_per_rank - 1) * group_sizes(num_ranks, num_microbatches)[0]
    lanes = Lanes(forwards, backwards)
    for rank in range(num_ranks):
        yield lanes.row(ahead=round_trip + 2 * (num_ranks - 1 - rank), down=rank)
