"""Small instances drawn at random, whose optimum can be proven: unequal costs, latencies, every kind of limit."""

from __future__ import annotations

import random
from typing import Any

from drumline.core.costs import Costs, Edge
from drumline.core.placement import Placement
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import Instance

_MOST_PAIRS = 16  # of ranks and microbatches, where a rank holds two stages


def drawn(seed: int) -> Instance:
    """Return an instance of up to 4 ranks and 6 microbatches.

    >>> drawn(0).num_ranks <= 4
    True
    """
    rng = random.Random(seed)
    kind = rng.choice([Placement.linear, Placement.linear, Placement.linear, Placement.v, Placement.loop])
    num_ranks, num_microbatches = rng.randint(2, 4), rng.randint(2, 6)
    while kind is not Placement.linear and num_ranks * num_microbatches > _MOST_PAIRS:
        num_ranks, num_microbatches = rng.randint(2, 4), rng.randint(2, 6)
    placement = kind(num_ranks)
    stages, per_rank = placement.num_stages, placement.num_stages // num_ranks

    def numbers(low: int, high: int) -> list[float]:
        return [float(rng.randint(low, high)) for _ in range(stages)]

    slow = rng.randrange(num_ranks - 1)
    edges = {(slow, slow + 1): Edge(latency=float(rng.randint(3, 12)))} if rng.random() < 0.3 else {}
    times: dict[str, Any] = {
        "forward": numbers(4, 16),
        "backward_input": numbers(4, 16),
        "backward_weight": numbers(2, 14),
    }
    comm = float(rng.choice([0, 0, 1, 2, 4]))
    if rng.random() < 0.5:
        limit = Limit(max_activations=rng.randint(per_rank, per_rank + num_ranks + 1))
        return Instance(Costs(**times, comm=comm, edges=edges), placement, num_microbatches, limit)
    sizes = numbers(4, 12)
    kept = [float(rng.randint(1, int(size))) for size in sizes]
    alone = max(sum(sizes[stage] for stage in placement.stages_of(rank)) for rank in range(num_ranks))
    costs = Costs(**times, comm=comm, edges=edges, activation_bytes=sizes, held_until_weight_bytes=kept)
    limit = Limit(max_bytes=float(rng.randint(int(alone), int(alone * (1.5 + num_ranks / 1.5)))))
    return Instance(costs, placement, num_microbatches, limit)
