"""V-Min (arXiv 2405.15362): the least activation memory, a third of 1F1B's, for two thirds of its bubble.

    4 ranks, 8 stages, 3 microbatches

    rank 0 |F0 F1 .. .. .. .. .. f0 i0 F2 w0 .. .. f1 i1 I0 w1 W0 .. f2 i2 I1 w2 W1 .. .. .. I2 W2 |
    rank 1 |.. F0 .. .. .. .. f0 F1 .. i0 w0 .. f1 F2 I0 i1 W0 w1 f2 .. I1 i2 W1 w2 .. .. I2 W2 .. |
    rank 2 |.. .. F0 .. .. f0 .. .. F1 .. i0 f1 w0 I0 F2 W0 i1 f2 w1 I1 W1 .. i2 w2 .. I2 W2 .. .. |
    rank 3 |.. .. .. F0 f0 .. .. .. .. F1 f1 i0 I0 w0 W0 F2 f2 i1 I1 w1 W1 .. .. i2 I2 w2 W2 .. .. |

The block moves one slot per rank in every direction, the fastest possible.
"""

from __future__ import annotations

from collections.abc import Iterable

from drumline.core.action import Action
from drumline.schedules.building_block import from_block
from drumline.schedules.registry import schedule


@schedule(
    "v-min", summary="two stages per rank in a V: a third of 1F1B's memory, two thirds of its bubble", stages_per_rank=2
)
def v_min(num_ranks: int, *, num_microbatches: int) -> Iterable[Iterable[Action]]:
    """Repeat a block of about 4P slots per rank: two thirds of P pairs."""
    # If P is a multiple of three, the way back would collide with the way there, so add two slots.
    gap = 2 if num_ranks % 3 == 0 else 0

    def offsets(rank: int) -> tuple[int, int, int, int]:
        turn = 2 * num_ranks
        return rank, turn - 1 - rank, turn + gap + rank, 2 * turn + gap - 1 - rank

    return from_block(num_ranks, num_microbatches, offsets)
