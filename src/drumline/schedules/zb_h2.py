"""ZB-H2 (arXiv 2401.10241): twice as many forwards ahead, so no rank ever waits after its first action.

    4 ranks, 4 stages, 7 microbatches

    rank 0 |F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .. .. .. |
    rank 1 |.. F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .. .. |
    rank 2 |.. .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .. |
    rank 3 |.. .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6 |

If F = I = W, each rank's own span has no bubble, but ranks start and end in a staircase. It pays off if the end of one
step overlaps the start of the next, that is if the optimizer does not synchronise the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.schedules.cells import Turns
from drumline.schedules.orders import delayed_weights
from drumline.schedules.registry import schedule


@schedule(
    "zb-h2",
    summary="no bubble inside any rank's span, for nearly twice 1F1B's memory; pays off across steps",
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: 2 * num_ranks - 1,
)
def zb_h2(num_ranks: int, *, num_microbatches: int) -> Iterator[Turns]:
    """Run 2(P-1-r) forwards ahead on rank r, with W delayed by 2r microbatches."""
    for rank in range(num_ranks):
        yield delayed_weights(rank, num_microbatches, ahead=2 * (num_ranks - 1 - rank), delay=2 * rank)
