"""Inference: forwards only, nothing stashed.

PICTURE
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action, F
from drumline.schedules.groups import visits
from drumline.schedules.registry import schedule


@schedule("forward-only", summary="inference: forwards only, nothing stashed", stages_per_rank=1, stage_counts="any")
def forward_only(num_ranks: int, *, num_microbatches: int, stages_per_rank: int = 1) -> Iterator[list[Action]]:
    """Run the forwards in groups, as interleaved schedules do."""
    order = list(visits(num_ranks, num_microbatches, stages_per_rank))
    for rank in range(num_ranks):
        yield [F(local * num_ranks + rank, m) for local, m in order]
