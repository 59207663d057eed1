"""PipeDream (arXiv 1806.03377): 1F1B without a flush; every backward is followed by an optimizer step.

PICTURE (rUm is the optimizer step)

A forward sees the newest weights of its rank and its backward the same ones, so rank r keeps up to P-r versions. The
program spans M optimizer steps, one per microbatch, and idles only at its very start and end.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action, Op
from drumline.schedules.one_f_one_b import alternating
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
