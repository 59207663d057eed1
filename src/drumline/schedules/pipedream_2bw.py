"""PipeDream-2BW (arXiv 2006.09503): 1F1B without a flush, gradients of M microbatches per step, two weight versions.

    2 ranks, 2 stages, 6 microbatches

    rank 0 |F0 F1 .. .. B0--- F2 B1--- F3 B2--- U1 F4 B3--- F5 B4--- .. B5--- U3 U5 |
    rank 1 |.. F0 B0--- F1 B1--- F2 B2--- F3 B3--- U1 F4 B4--- F5 B5--- U3 U5 .. .. |

Step t computes with W(t-1): W(t+1) = W(t) - lr * gradient(W(t-1)). A forward uses the updates before it in its row. So
the update of step t comes just before the first forward of step t+2, the first that may use it.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Op
from drumline.core.errors import ScheduleError, counted
from drumline.schedules.cells import Turns
from drumline.schedules.registry import schedule


@schedule("pipedream-2bw", summary="asynchronous 1F1B over several steps with two weight versions, one step stale")
def pipedream_2bw(num_ranks: int, *, num_microbatches: int, num_steps: int = 4) -> Iterator[Turns]:
    """Run 1F1B over num_steps x num_microbatches, with each step's update where step t+2 begins."""
    if num_microbatches < num_ranks:
        raise ScheduleError(
            f"pipedream-2bw with {counted(num_microbatches, 'microbatch')} per step on {counted(num_ranks, 'rank')} "
            "needs a third weight version",
            expected="at least as many microbatches as ranks",
            fix=f"use {num_ranks} microbatches",
        )
    if num_steps < 1:
        raise ScheduleError(f"num_steps is {num_steps}", expected="1 or more")
    for rank in range(num_ranks):
        forward, backward, ahead = (rank, Op.FORWARD), (rank, Op.BACKWARD), num_ranks - 1 - rank
        row = Turns().add(ahead, forward)
        row.add(min(num_steps, 2) * num_microbatches - ahead, forward, backward)
        updates = range(num_microbatches - 1, num_steps * num_microbatches, num_microbatches)
        for update in updates[:-2]:
            row.once(rank, Op.UPDATE, update).add(num_microbatches, forward, backward)
        row.add(ahead, backward)
        for update in updates[-2:]:
            row.once(rank, Op.UPDATE, update)
        yield row
