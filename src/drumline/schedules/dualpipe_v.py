"""DualPipeV: DualPipe folded in the middle, so that half the ranks hold one copy of every stage in a V.

PICTURE

The recipe is made for M >= 2P; fewer microbatches are cut out of a larger run.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action
from drumline.schedules.eight_steps import EightSteps
from drumline.schedules.registry import schedule
from drumline.schedules.trim import below, trim


@schedule(
    "dualpipe-v", summary="DualPipe in a V: its overlap of F with B, with one copy of the weights", stages_per_rank=2
)
def dualpipe_v(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Run the eight steps on every rank, flow 0 down the V and flow 1 up."""
    full = max(num_microbatches, 2 * num_ranks)
    for rank in range(num_ranks):
        legs = (rank, 2 * num_ranks - 1 - rank)
        steps = EightSteps(num_ranks, rank, full, lambda flow, number, legs=legs: (legs[flow], number))  # type: ignore[misc]
        yield list(trim(steps.row(), below(num_microbatches)))
