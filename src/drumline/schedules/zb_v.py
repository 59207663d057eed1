"""ZB-V (arXiv 2401.10241, section 6): each rank holds one stage on the way down and one on the way up.

    4 ranks, 8 stages, 4 microbatches

    rank 0 |F0 F1 F2 F3 .. .. .. f0 i0 w0 f1 i1 w1 f2 i2 w2 f3 i3 w3 I0 W0 .. I1 W1 .. I2 W2 .. I3 W3 |
    rank 1 |.. F0 F1 F2 F3 .. f0 .. f1 i0 w0 f2 i1 w1 f3 i2 w2 I0 W0 i3 w3 I1 W1 .. I2 W2 .. I3 W3 .. |
    rank 2 |.. .. F0 F1 F2 f0 F3 f1 .. f2 i0 w0 f3 i1 w1 I0 W0 i2 w2 I1 W1 i3 w3 I2 W2 .. I3 W3 .. .. |
    rank 3 |.. .. .. F0 f0 F1 f1 F2 f2 F3 f3 i0 w0 I0 W0 i1 w1 I1 W1 i2 w2 I2 W2 i3 w3 I3 W3 .. .. .. |

If F = I = W and M >= 2P, no rank idles between its first and last action, with 1F1B's memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import Turns
from drumline.schedules.formulas import Pace, idling
from drumline.schedules.registry import schedule


def _idle(pace: Pace, num_ranks: int) -> float:
    """Return the idle time of the hand-made order; the formula was read off the simulator; (P-1)F if F = I = W.

    An I that is longer than two W, as with full recomputation, delays every rank.
    """
    forward, back, weight = pace.forward, pace.backward_input, pace.backward_weight
    if num_ranks == 1:
        return 0.0
    delay = (num_ranks - 1) * max(back - 2 * weight, 0.0)
    return (num_ranks - 2) * max(back, weight, 2 * forward - back) + max(forward, back) + delay


@schedule(
    "zb-v",
    summary="two stages per rank in a V: no bubble inside the span if F = I = W, with 1F1B's memory",
    stages_per_rank=2,
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: 2 * num_ranks,
    makespan=idling(_idle),
    makespan_holds=lambda num_ranks, num_microbatches, stages_per_rank: num_microbatches > 2 * num_ranks,
    planned_with=(2,),
    titan="ZBVZeroBubble",
)
def zb_v(num_ranks: int, *, num_microbatches: int) -> Iterator[Turns]:
    """Run the recipe's three phases; with fewer than 2P-1 microbatches, use part of a full run."""
    full = max(num_microbatches, 2 * num_ranks - 1)
    for rank in range(num_ranks):
        yield _filled(Turns(below=num_microbatches), rank, num_ranks, full)


def _filled(row: Turns, rank: int, num_ranks: int, num_microbatches: int) -> Turns:
    forward_down, *back_down = ((rank, op) for op in _OPS)
    forward_up, *back_up = ((2 * num_ranks - 1 - rank, op) for op in _OPS)
    # Fill: forwards on the way down until the first one comes back up, then F I W on the way up.
    row.add(2 * (num_ranks - rank) - 1, forward_down)
    row.add(rank, forward_up, forward_down)
    row.add(num_ranks - rank, forward_up, *back_up)
    # Steady: alternate F I W of both stages; the way down finishes its forwards before the way up.
    left, forwards = num_microbatches - num_ranks, num_microbatches - (2 * num_ranks - rank - 1)
    row.add(forwards, forward_down, *back_down, forward_up, *back_up)
    row.add(left - forwards, *back_down, forward_up, *back_up)
    # Drain: input gradients as they arrive, weight gradients when there is nothing else to do.
    (input_down, weight_down), (input_up, weight_up) = back_down, back_up
    row.add(rank, input_down, input_up)
    row.add(num_ranks - rank, input_down, weight_down)
    row.add(rank, weight_up)
    row.add(rank, weight_down)
    return row


_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
