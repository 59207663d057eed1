"""ZB-H1 (arXiv 2401.10241): 1F1B with split backwards; weight gradients fill the bubble of the drain.

    4 ranks, 4 stages, 6 microbatches

    rank 0 |F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 I3 W3 I4 W4 I5 W5 |
    rank 1 |.. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5 |
    rank 2 |.. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5 |
    rank 3 |.. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5 |

Rank r delays its W by r microbatches, so every rank holds P pairs and all remaining W fit after the last I.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.schedules.cells import Turns
from drumline.schedules.formulas import Pace, idling
from drumline.schedules.orders import delayed_weights
from drumline.schedules.registry import schedule


def _idle(pace: Pace, num_ranks: int) -> float:
    """Return (P-1)(F+I-W); a W longer than F or I fills no more than they leave."""
    fills = min(pace.forward, pace.backward_input, pace.backward_weight)
    return (num_ranks - 1) * (pace.forward + pace.backward_input - fills)


@schedule(
    "zb-h1",
    summary="1F1B with W delayed into the drain: a third of its bubble, the same peak memory",
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: num_ranks,
    makespan=idling(_idle),
    makespan_holds=lambda num_ranks, num_microbatches, stages_per_rank: num_microbatches >= num_ranks,
    planned_with=(1,),
    formula_in_slices=True,
)
def zb_h1(num_ranks: int, *, num_microbatches: int) -> Iterator[Turns]:
    """Run 1F1B with split backwards, W delayed by r microbatches on rank r."""
    for rank in range(num_ranks):
        yield delayed_weights(rank, num_microbatches, ahead=num_ranks - 1 - rank, delay=rank)
