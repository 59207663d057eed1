"""Interleaved zero bubble (ZB1P over a loop, like PyTorch's InterleavedZeroBubble).

    4 ranks, 8 stages, 4 microbatches

    rank 0 |F0 F1 F2 F3 f0 f1 f2 f3 .. .. .. i0 w0 i1 w1 i2 w2 i3 w3 I0 W0 I1 W1 I2 W2 I3 W3 |
    rank 1 |.. F0 F1 F2 F3 f0 f1 f2 .. .. i0 f3 i1 w0 i2 w1 i3 w2 I0 w3 I1 W0 I2 W1 I3 W2 W3 |
    rank 2 |.. .. F0 F1 F2 F3 f0 f1 .. i0 f2 i1 f3 i2 w0 i3 w1 I0 w2 I1 w3 I2 W0 I3 W1 W2 W3 |
    rank 3 |.. .. .. F0 F1 F2 F3 f0 i0 f1 i1 f2 i2 f3 i3 w0 I0 w1 I1 w2 I2 w3 I3 W0 W1 W2 W3 |

Rank r runs (P-1-r) + (v-1)P forwards ahead, half as many hops as interleaved 1F1B because I is shorter than B, and
delays W by r.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import InTurn, Lanes, cells
from drumline.schedules.orders import group_sizes, visits
from drumline.schedules.registry import schedule


@schedule(
    "interleaved-zb",
    summary="interleaved 1F1B with split backwards: W fills the rest of the bubble",
    stages_per_rank=2,
    stage_counts="any",
)
def interleaved_zb(num_ranks: int, *, num_microbatches: int, stages_per_rank: int = 2) -> Iterator[InTurn]:
    """Alternate the grouped forwards and input halves, with weight halves delayed by r."""
    local, microbatches = visits(num_ranks, num_microbatches, stages_per_rank)
    forwards, back = cells(Op.FORWARD, local * num_ranks, microbatches), (stages_per_rank - 1 - local) * num_ranks
    halves = [cells(op, back, microbatches) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    round_trip = (stages_per_rank - 1) * group_sizes(num_ranks, num_microbatches)[0]
    lanes = Lanes(forwards, *halves)
    for rank in range(num_ranks):
        yield lanes.row(ahead=round_trip + num_ranks - 1 - rank, delay=rank, down=rank)
