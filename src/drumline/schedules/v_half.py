"""V-Half (arXiv 2405.15362): half of 1F1B's activation memory, and half of its bubble.

    4 ranks, 8 stages, 3 microbatches

    rank 0 |F0 F1 .. .. .. .. .. f0 F2 i0 w0 f1 i1 w1 .. f2 .. I0 i2 W0 w2 I1 W1 .. .. I2 W2 |
    rank 1 |.. F0 F1 .. .. .. f0 .. .. F2 f1 i0 w0 .. f2 i1 I0 w1 W0 i2 I1 w2 W1 .. I2 W2 .. |
    rank 2 |.. .. F0 .. .. f0 F1 .. .. f1 F2 .. i0 f2 w0 I0 i1 W0 w1 I1 i2 W1 w2 I2 W2 .. .. |
    rank 3 |.. .. .. F0 f0 .. .. F1 f1 .. .. F2 f2 i0 I0 w0 W0 i1 I1 w1 W1 i2 I2 w2 W2 .. .. |

The block moves two slots per rank on its way down (F of the lower stages, I of the upper ones) and one slot on its way
up.
"""

from __future__ import annotations

from collections.abc import Iterable

from drumline.core.action import Action
from drumline.schedules.building_block import from_block
from drumline.schedules.formulas import Paces
from drumline.schedules.registry import schedule


def _makespan(paces: Paces) -> float:
    """Return half of 1F1B's bubble; if I is longer than F and half of W, every microbatch waits.

    The pattern assumes equal F, I and W.
    """
    if paces.num_ranks == 1:
        return paces.steady
    lost = sum(count * (pace.forward + 3 * pace.backward_input - pace.backward_weight) for pace, count in paces.others)
    busiest = paces.busiest
    wait = max(2 * (busiest.backward_input - busiest.forward) - busiest.backward_weight, 0.0)
    late = max(paces.num_microbatches - paces.num_ranks / 2 - 1, 0.0) * wait
    return paces.steady + (lost + late) / paces.stages_per_rank + 8 * paces.hops


@schedule(
    "v-half",
    summary="two stages per rank in a V: half of 1F1B's memory and about half of its bubble",
    stages_per_rank=2,
    peak_pairs=lambda rank, num_ranks, num_microbatches, stages_per_rank: (
        2 * (num_ranks // 2 + 1) if num_ranks > 1 else 2
    ),
    makespan=_makespan,
    makespan_holds=lambda num_ranks, num_microbatches, stages_per_rank: False,  # a sketch; up to 10% too long
    planned_with=(2,),
)
def v_half(num_ranks: int, *, num_microbatches: int) -> Iterable[Iterable[Action]]:
    """Repeat a block of about 6P slots per rank: P pairs."""
    # With an even P the way back would collide with the way there, so add three slots.
    gap = 3 if num_ranks % 2 == 0 else 0

    def offsets(rank: int) -> tuple[int, int, int, int]:
        turn = 3 * num_ranks - 2
        return 2 * rank, turn - rank, turn + 1 + gap + 2 * rank, 2 * turn + 2 + gap - rank

    return from_block(num_ranks, num_microbatches, offsets)
