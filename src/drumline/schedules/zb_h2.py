"""ZB-H2 (arXiv 2401.10241): twice as many forwards ahead, so that no rank ever waits after its first action.

PICTURE

Each rank's own span is free of bubbles where F = I = W, but the ranks start and end in a staircase: it pays where one
step's end overlaps the next one's start, that is where the optimizer does not synchronise the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action
from drumline.schedules.registry import schedule
from drumline.schedules.zb_h1 import delayed_weights


@schedule("zb-h2", summary="no bubble inside any rank's span, for nearly twice 1F1B's memory; pays across steps")
def zb_h2(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Run 2(P-1-r) forwards ahead and W delayed by 2r microbatches on rank r."""
    for rank in range(num_ranks):
        yield list(delayed_weights(rank, num_microbatches, ahead=2 * (num_ranks - 1 - rank), delay=2 * rank))
