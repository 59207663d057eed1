"""Proven optima of small instances, by OR-Tools' CP-SAT (the extra `plan`): an oracle for tests and benchmarks.

An action is an interval of its rank; those of one rank do not overlap. What is held is a profile over time: a pair's
bytes from F's start to I's end, what stays of them to W's end, and what I adds while it runs.

    F ├──┤            I ├──┤        W ├──┤
      ├── held from F ─────┼ to W ───────┤       at no time more than the limit

The solver counts in whole numbers, so costs are multiplied by a power of ten until they are whole. Backwards are split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.core.errors import CostsError, PlanError, installing
from drumline.core.graph import Messages
from drumline.plan.search.bounds.instance import F, I, Instance, Rows, W

_LARGEST = 10**6


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best rows that were found, their value, and a value that nothing can go below; equal where it is proven."""

    rows: Rows
    value: float
    bound: float

    @property
    def is_proven(self) -> bool:
        """Whether nothing better exists."""
        return self.value <= self.bound * (1 + 1e-9)


def optimum(instance: Instance, objective: str = "makespan", *, seconds: float = 60.0, workers: int = 1) -> Optimum:
    """Return the optimum of a small instance, or what was known of it after `seconds`.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.timeline.idle import Limit
    >>> from drumline.core.placement import Placement
    >>> one = Instance(Costs(), Placement.linear(2), 2, Limit(max_activations=1))
    >>> optimum(one).value  # doctest: +SKIP
    11.0
    """
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise PlanError("OR-Tools is not installed", expected="the extra `plan`", fix=installing("plan")) from None
    if instance.messages is not Messages.LATENCY:
        raise CostsError("the costs have finite links", expected="pure latency, for a proven optimum")
    scale = _scale(instance)
    model = cp_model.CpModel()
    starts = _times(model, instance, scale)
    _limit(model, instance, starts, scale)
    _aim(model, instance, starts, objective, scale)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = workers
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise PlanError(f"nothing was found in {seconds:g} s", fix="give it more seconds, or a smaller instance")
    rows: Rows = [[] for _ in range(instance.num_ranks)]
    for number in sorted(starts, key=lambda index: (solver.value(starts[index]), index)):
        rows[instance.rank[number // 4]].append(number)
    return Optimum(rows, solver.objective_value / scale, solver.best_objective_bound / scale)


def _scale(instance: Instance) -> int:
    numbers = [*instance.seconds, *instance.latency]
    for power in range(7):
        if (
            all(abs(x * 10**power - round(x * 10**power)) < 1e-6 for x in numbers)
            and max(numbers) * 10**power < _LARGEST
        ):
            return int(10**power)
    raise CostsError(
        "the costs are no decimal fractions of up to six digits", expected="numbers like 1.25, for a proof"
    )


def _split(instance: Instance) -> list[int]:
    """Return every F, I and W."""
    return [4 * pair + op for pair in range(len(instance.rank)) for op in (F, I, W)]


def _times(model: Any, instance: Instance, scale: int) -> dict[int, Any]:
    """Add every action's start, and its order: needs, one action at a time on a rank, equal microbatches in turn."""
    numbers = _split(instance)
    lasts = {n: round(instance.seconds[n] * scale) for n in numbers}
    horizon = sum(lasts.values()) + sum(round(value * scale) for value in instance.latency)
    starts = {n: model.new_int_var(0, horizon, f"{instance.action(n)}") for n in numbers}
    on_rank: list[list[Any]] = [[] for _ in range(instance.num_ranks)]
    for n in numbers:
        on_rank[instance.rank[n // 4]].append(model.new_fixed_size_interval_var(starts[n], lasts[n], f"{n}"))
        needed = n - 1 if n % 4 == W else instance.need[n]
        if needed >= 0:
            lag = round(instance.latency[needed] * scale) if instance.rank[needed // 4] != instance.rank[n // 4] else 0
            model.add(starts[n] >= starts[needed] + lasts[needed] + lag)
    for intervals in on_rank:
        model.add_no_overlap(intervals)
    if len(set(instance.costs.factors(instance.num_microbatches))) == 1:
        for lanes in instance.lanes:
            for lane in lanes:
                for m, later in zip(lane.microbatches, lane.microbatches[1:], strict=False):
                    for op in (F, I, W):
                        number, other = instance.number(lane.stage, op, m), instance.number(lane.stage, op, later)
                        model.add(starts[other] >= starts[number] + lasts[number])
    return starts


def _limit(model: Any, instance: Instance, starts: dict[int, Any], scale: int) -> None:
    ends = {n: starts[n] + round(instance.seconds[n] * scale) for n in starts}
    for resource in instance.resources:
        profile: list[list[tuple[Any, int]]] = [[] for _ in range(instance.num_ranks)]
        for pair, rank in enumerate(instance.rank):
            forward, first, second = 4 * pair + F, 4 * pair + I, 4 * pair + W
            stays = -resource.after[second]
            held = [
                (starts[forward], ends[first], resource.after[forward]),
                (starts[first], ends[first], resource.during[first]),
                (ends[first], ends[second], stays),
            ]
            for at, (begin, end, size) in enumerate(held):
                if size > 0:
                    length = model.new_int_var(0, 10**9, f"length{pair}.{at}")
                    interval = model.new_interval_var(begin, length, end, f"held{pair}.{at}")
                    profile[rank].append((interval, round(size)))
        for rank, held_on in enumerate(profile):
            most = int(resource.most - resource.always[rank])
            model.add_cumulative([value for value, _ in held_on], [size for _, size in held_on], most)


def _aim(model: Any, instance: Instance, starts: dict[int, Any], objective: str, scale: int) -> None:
    value = model.new_int_var(0, 10**9, "value")
    for rank, lanes in enumerate(instance.lanes):
        begin: Any = 0
        if objective == "span":
            begin = model.new_int_var(0, 10**9, f"begin{rank}")
            model.add_min_equality(
                begin, [starts[instance.number(lane.stage, F, lane.microbatches[0])] for lane in lanes]
            )
        for lane in lanes:
            for m in lane.microbatches:
                last = instance.number(lane.stage, W, m)
                model.add(value >= starts[last] + round(instance.seconds[last] * scale) - begin)
    model.minimize(value)
