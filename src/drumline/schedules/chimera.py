"""Chimera (arXiv 2107.06925): two opposed 1F1B pipelines that fill each other's bubbles.

    4 ranks, 4 stages, 4 microbatches

    rank 0 |F0 F1 .. f2 b2 f3 b3 B0 .. B1 |
    rank 1 |.. F0 f2 F1 f3 b2 B0 b3 B1 .. |
    rank 2 |.. f2 F0 f3 F1 B0 b2 B1 b3 .. |
    rank 3 |f2 f3 .. F0 B0 F1 B1 b2 .. b3 |

Every stage has two copies, on ranks r and P-1-r; half the microbatches go down, half up. In slots of one forward or one
backward, a unit of P microbatches uses each of 2P slots once on every rank, so units follow each other without a gap:

    on rank r, number n of its direction, q ranks from where it entered:   F at q + 2n,   B at 2P - 1 - q + 2n
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action, B, F, Op
from drumline.schedules.registry import schedule


@schedule("chimera", summary="two opposed 1F1B: half the bubble at small M; twice the weights", even_ranks=True)
def chimera(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Merge both directions by slot, then exchange the gradients of the two copies."""
    num_down = (num_microbatches + 1) // 2
    for rank in range(num_ranks):
        slots: list[tuple[int, Action]] = []
        for m in range(num_microbatches):
            stage, number = (rank, m) if m < num_down else (num_ranks - 1 - rank, m - num_down)
            unit, inside = divmod(number, num_ranks // 2)
            start = 2 * num_ranks * unit + 2 * inside
            slots += [(start + stage, F(stage, m)), (start + 2 * num_ranks - 1 - stage, B(stage, m))]
        row = [action for _, action in sorted(slots, key=lambda slot: slot[0])]
        yield row + [Action(stage, Op.REDUCE_GRAD) for stage in sorted({action.stage for action in row})]
