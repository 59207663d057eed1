"""What a schedule does with ranks: which stages a rank has, how many pairs it holds, how long they take.

Where the schedule has no formula its program is made, and counted or simulated, for as few microbatches as show
everything: a step's middle repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from drumline.core.costs import Costs
from drumline.core.simulate.memory import holdings
from drumline.core.simulate.simulate import simulate
from drumline.plan.cluster.kernels import Ops
from drumline.schedules import find, generate


def stages_of(schedule: str, rank: int, num_ranks: int, stages_per_rank: int) -> tuple[tuple[int, float], ...]:
    """Return a rank's stages, each with the part of its microbatches that runs there.

    >>> stages_of("interleaved-1f1b", 1, 4, 2), stages_of("zb-v", 1, 4, 2), stages_of("dualpipe", 1, 4, 1)
    (((1, 1.0), (5, 1.0)), ((1, 1.0), (6, 1.0)), ((1, 0.5), (2, 0.5)))
    """
    layout = find(schedule).layout(num_ranks, stages_per_rank)
    part = 0.5 if layout.mirrored else 1.0
    own_first = sorted(layout.stages_of(rank), key=lambda stage: layout.homes[stage] != rank)
    return tuple((stage, part) for stage in own_first)


def num_sides(schedule: str, stage: int, num_ranks: int, num_stages: int) -> int:
    """Return on how many sides a stage has a neighbour on another rank.

    >>> [num_sides("1f1b", stage, 4, 4) for stage in range(4)], [num_sides("zb-v", stage, 2, 4) for stage in range(4)]
    ([1, 2, 2, 1], [1, 1, 1, 1])
    """
    homes = find(schedule).layout(num_ranks, num_stages // num_ranks).homes
    return sum(homes[other] != homes[stage] for other in (stage - 1, stage + 1) if 0 <= other < num_stages)


def pairs_held(schedule: str, rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Return how many (stage, microbatch) pairs a rank holds at most.

    >>> [pairs_held("1f1b", rank, 4, 8, 1) for rank in range(4)], pairs_held("interleaved-1f1b", 0, 4, 8, 2)
    ([4, 3, 2, 1], 11)
    """
    formula = find(schedule).peak_pairs
    if formula is not None:
        found = formula(rank, num_ranks, num_microbatches, stages_per_rank)
    else:
        found = _counted(schedule, num_ranks, _few(num_ranks, num_microbatches), stages_per_rank)[rank]
    return min(found, num_microbatches * stages_per_rank)


def simulated(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> float:
    """Return how long the ranks take by the simulator, every microbatch of it.

    >>> from drumline.plan.cluster.kernels import Work
    >>> simulated("zb-h1", [Ops(Work(1.0), Work(), Work(1.0), Work(1.0))] * 4, 4, 8)
    27.0
    """
    costs = Costs(
        forward=[one.forward.total for one in stages],
        backward_input=[one.again.total + one.backward_input.total for one in stages],
        backward_weight=[one.backward_weight.total for one in stages],
        comm=hop_seconds,
    )
    per_rank = max(len(stages) // num_ranks, 1)
    program = generate(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=per_rank)
    return simulate(program, costs).makespan


def simulated_few(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> float:
    """Simulate as many microbatches as show everything, and add the others at the pace that these have at last."""
    few = _few(num_ranks, num_microbatches)
    taken = simulated(schedule, stages, num_ranks, few, hop_seconds=hop_seconds)
    if few == num_microbatches:
        return taken
    fewer = few - max(num_ranks // 2 * 2, 2)
    before = simulated(schedule, stages, num_ranks, fewer, hop_seconds=hop_seconds)
    return taken + (num_microbatches - few) * (taken - before) / (few - fewer)


def _few(num_ranks: int, num_microbatches: int) -> int:
    """Return a smaller count that shows the same; two directions want an even one where the whole is even."""
    return num_microbatches if num_microbatches <= 4 * num_ranks else 4 * num_ranks + num_microbatches % 2


@lru_cache(maxsize=256)
def _counted(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    program = find(schedule).build(num_ranks, num_microbatches, stages_per_rank)
    return tuple(holding.peak_pairs for holding in holdings(program, Costs()))
