"""PipeDream (arXiv 1806.03377): 1F1B without a flush; an optimizer step follows every backward.

    3 ranks, 3 stages, 4 microbatches

    rank 0 |F0 F1 F2 .. .. .. .. B0--- U0 F3 B1--- U1 .. B2--- U2 .. B3--- U3 |
    rank 1 |.. F0 F1 .. .. B0--- U0 F2 B1--- U1 F3 B2--- U2 .. B3--- U3 .. .. |
    rank 2 |.. .. F0 B0--- U0 F1 B1--- U1 F2 B2--- U2 F3 B3--- U3 .. .. .. .. |

A forward uses the newest weights of its rank, and its backward uses the same ones, so rank r keeps up to P-r versions.
The program spans M optimizer steps, one per microbatch, and idles only at its very start and end.

With vertical sync, all ranks use the version that rank 0 uses: the update of microbatch m comes before the forward of
microbatch m+P in every row. Then rank r also keeps the gradients of up to r+1 microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.schedules.cells import Turns
from drumline.schedules.registry import schedule


@schedule("pipedream", summary="asynchronous 1F1B: no flush, an update per microbatch, up to P weight versions")
def pipedream(num_ranks: int, *, num_microbatches: int, vertical_sync: bool = False) -> Iterator[Turns]:
    """Run 1F1B and update after every backward, or with vertical sync where rank 0 does."""
    for rank in range(num_ranks):
        forward, backward, update = ((rank, op) for op in (Op.FORWARD, Op.BACKWARD, Op.UPDATE))
        ahead = min(num_ranks - 1 - rank, num_microbatches)
        row, turns = Turns().add(ahead, forward), num_microbatches - ahead
        if vertical_sync:
            early = min(rank + 1, turns)  # up to the forward of microbatch P-1
            row.add(early, forward, backward).add(turns - early, update, forward, backward)
            yield row.add(ahead, backward).add(num_microbatches - (turns - early), update)
        else:
            yield row.add(turns, forward, backward, update).add(ahead, backward, update)
