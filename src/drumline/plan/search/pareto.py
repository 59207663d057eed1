"""Bubble against memory: the best program found under every limit, from the smallest feasible limit to plenty.

Limits are in whole microbatches (v pairs of 1/v each count as one), or in bytes if these are known. So placements can
be compared with each other and with every hand-made schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drumline.core.costs import Costs, cut_finer
from drumline.core.memory import holdings
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.core.units import number, size_text
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.objective import Objective
from drumline.plan.search.search import PLACEMENTS, admitted, search, shared
from drumline.plan.search.starts import starts

_MOST_LIMITS = 12


@dataclass(frozen=True, slots=True)
class Point:
    """A program's memory and bubble; for a searched one, also its `limit` and the smallest bubble this allows."""

    name: str
    placement: str
    memory: float
    bubble: float
    limit: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Pareto:
    """The search results for every limit, and every hand-made schedule; memory in `unit`.

    `left_out` says, by name, why placements were not searched.
    """

    num_ranks: int
    num_microbatches: int
    objective: str
    unit: str
    searched: tuple[Point, ...]
    hand_made: tuple[Point, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def front(self) -> tuple[Point, ...]:
        """The searched programs that no other beats in both memory and bubble, the smallest first."""
        best, points = float("inf"), []
        for point in sorted(self.searched, key=lambda other: (other.memory, other.bubble)):
            if point.bubble < best:
                best = point.bubble
                points.append(point)
        return tuple(points)

    def possible(self, memory: float) -> float:
        """Return the smallest bubble that any placement's bound allows within this memory.

        Between two limits the larger one's bound holds: whatever fits in less also fits in more.
        """
        bounds = []
        for name in {point.placement for point in self.searched}:
            mine = sorted(
                (point.limit or 0.0, point.bound or 0.0) for point in self.searched if point.placement == name
            )
            if memory >= mine[0][0]:
                bounds.append(next((bound for limit, bound in mine if limit >= memory), mine[-1][1]))
        return min(bounds, default=1.0)

    def summary(self) -> dict[str, Any]:
        """Return everything as plain data."""

        def listed(points: tuple[Point, ...]) -> list[dict[str, Any]]:
            return [{name: getattr(point, name) for name in Point.__slots__} for point in points]

        return {
            "ranks": self.num_ranks,
            "microbatches": self.num_microbatches,
            "objective": self.objective,
            "unit": self.unit,
            "searched": listed(self.searched),
            "front": listed(self.front),
            "hand_made": listed(self.hand_made),
            "left_out": [{"placement": name, "error": reason} for name, reason in self.left_out.items()],
        }


def pareto(
    costs: Costs,
    num_ranks: int,
    *,
    num_microbatches: int,
    placement: str | None = None,
    stages_per_rank: int | None = None,
    objective: str = "makespan",
    seconds: float | None = None,
    tries: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Pareto:
    """Return the trade-off for one placement, or for all of them.

    The limits share the seconds, 10 unless given; `tries` applies to each of them, and alone no clock counts.

    >>> picture = pareto(Costs(), 2, num_microbatches=4, placement="linear", seconds=2)
    >>> [(point.memory, round(point.bubble, 3)) for point in picture.front]
    [(1.0, 0.4), (2.0, 0.077)]
    """
    names = PLACEMENTS if placement is None else (placement,)
    placements, refused = admitted(names, num_ranks, num_microbatches, stages_per_rank)
    if not placements:
        raise refused[names[0]]
    # With several placements, stages are cut finer if a rank holds several.
    parts = [layout.num_stages // num_ranks if placement is None else 1 for layout in placements.values()]
    instances = [
        Instance(cut_finer(costs, part), layout, num_microbatches)
        for part, layout in zip(parts, placements.values(), strict=True)
    ]
    in_bytes = costs.activation_bytes is not None
    known = [(problem, start) for problem in instances for start in starts(problem, Objective(problem, objective))]
    hand_made = []
    for problem, start in known:
        peak, bubble = _peak(problem, start.program, in_bytes), _bubble(problem, start.program, start.value)
        hand_made.append(Point(start.name, problem.placement.name, peak, bubble))
    jobs = [
        (p, memory)
        for p in instances
        for memory in _limits(p, in_bytes, [dot.memory for dot in hand_made if dot.placement == p.placement.name])
    ]
    searched = []
    for instance, memory in jobs:
        if progress is not None:
            progress(f"{instance.placement.name} within {size_text(memory) if in_bytes else number(memory)}")
        per_rank = instance.num_stages // num_ranks
        limit = Limit(max_bytes=memory) if in_bytes else Limit(max_activations=round(memory * per_rank))
        result = search(
            instance.costs,
            instance.placement,
            num_microbatches=num_microbatches,
            limit=limit,
            objective=objective,
            seconds=shared(seconds, tries, len(jobs)),
            tries=tries,
            seed=seed,
        )
        bubble, bound = (_bubble(instance, result.program, value) for value in (result.value, result.bound.value))
        peak = _peak(instance, result.program, in_bytes)
        searched.append(Point("searched", instance.placement.name, peak, bubble, memory, max(bound, 0.0)))
    unit = "bytes" if in_bytes else "microbatches"
    left_out = {name: str(error) for name, error in refused.items()}
    return Pareto(num_ranks, num_microbatches, objective, unit, tuple(searched), tuple(hand_made), left_out)


def _limits(instance: Instance, in_bytes: bool, peaks: Sequence[float]) -> list[float]:
    """Return limits from what one microbatch holds to more than any program uses, with the hand-made ones between."""
    least = _peak(instance, instance.plain, in_bytes)
    alone = least if in_bytes else 1.0
    most = alone * min(instance.num_microbatches, 2 * instance.num_ranks)
    step = least / 4 if in_bytes else instance.num_ranks / instance.num_stages
    count = round((most - least) / step) + 1
    places = sorted({round(at * (count - 1) / (_MOST_LIMITS - 1)) for at in range(_MOST_LIMITS)}) if count > 1 else [0]
    spaced = [least + step * at for at in places]
    return sorted({round(limit, 9) for limit in (*spaced, *peaks) if limit <= most * (1 + 1e-9)})


def _peak(instance: Instance, program: Program, in_bytes: bool) -> float:
    """Return the largest rank's peak: bytes, or pairs divided by the stages per rank."""
    held_by_rank = holdings(program, instance.costs)
    if in_bytes:
        return max(holding.peak_bytes or 0.0 for holding in held_by_rank)
    return max(holding.peak_pairs for holding in held_by_rank) * instance.num_ranks / instance.num_stages


def _bubble(instance: Instance, program: Program, value: float) -> float:
    """Return the idle share of `value` seconds on every rank."""
    rows = instance.rows_of(program)
    busy = (
        sum(instance.seconds[number] for row in rows for number in row)
        if rows is not None
        else sum(simulate(program, instance.costs).busy)
    )
    return 1 - busy / (instance.num_ranks * value) if value > 0 else 0.0
