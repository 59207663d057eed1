"""PipeDream (arXiv 1806.03377): 1F1B without a flush; an optimizer step follows every backward.

    3 ranks, 3 stages, 4 microbatches

    rank 0 |F0 F1 F2 .. .. .. .. B0--- U0 F3 B1--- U1 .. B2--- U2 .. B3--- U3 |
    rank 1 |.. F0 F1 .. .. B0--- U0 F2 B1--- U1 F3 B2--- U2 .. B3--- U3 .. .. |
    rank 2 |.. .. F0 B0--- U0 F1 B1--- U1 F2 B2--- U2 F3 B3--- U3 .. .. .. .. |

A forward uses the newest weights of its rank, and its backward uses the same ones, so rank r keeps up to P-r versions.
The program spans M optimizer steps, one per microbatch, and idles only at its very start and end.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action, Op
from drumline.schedules.orders import alternating
from drumline.schedules.registry import schedule


@schedule("pipedream", summary="asynchronous 1F1B: no flush, an update per microbatch, up to P weight versions")
def pipedream(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Run 1F1B and update after every backward."""
    for rank in range(num_ranks):
        row: list[Action] = []
        for action in alternating(rank, num_microbatches, ahead=num_ranks - 1 - rank):
            row.append(action)
            if action.op is Op.BACKWARD:
                row.append(Action(rank, Op.UPDATE, action.microbatch))
        yield row
