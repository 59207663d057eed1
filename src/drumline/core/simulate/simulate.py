"""Simulate a program: the times of every action, for given costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from drumline.core.clock.assemble import compile_program
from drumline.core.clock.evaluate import Order, latest_ends, order_of
from drumline.core.costs import Costs
from drumline.core.errors import CostsError, ProgramError
from drumline.core.graph import Floats, Messages, NotCompilable, TimeGraph
from drumline.core.program import Program, once_per_program
from drumline.core.prove.slices import in_order
from drumline.core.prove.validate import misplaced_or_misused, validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.durations import (
    lags,
    node_seconds,
    work_seconds,
)
from drumline.core.simulate.simulation import Simulation, simulation_of
from drumline.core.timeline.idle import Limit

__all__ = ["Simulation", "compiled", "invalid", "makespans", "node_order", "simulate"]


def simulate(
    program: Program, costs: Costs | None = None, *, limit: Limit | None = None, factors: Floats | None = None
) -> Simulation:
    """Return the timeline of `program` under `costs`; every action starts as soon as what it waits for allows.

    A `limit` changes no times: it lets the causes of idle time show where holding more would have helped. `factors`
    multiply the seconds of each compute and update action, as in `makespans`.

    >>> from drumline.schedules import generate
    >>> timeline = simulate(generate("1f1b", num_ranks=4, num_microbatches=8))
    >>> timeline.makespan, round(timeline.bubble, 4), timeline.peak_activations
    (33.0, 0.2727, (4, 3, 2, 1))
    """
    if not isinstance(program, Program):
        raise ProgramError(f"{program!r:.60} is not a program", fix='make one with dl.generate("1f1b", ...)')
    costs = costs or Costs()
    if limit is not None:
        limit.check(costs)
    try:
        graph = compiled(program, costs)
        work = work_seconds(graph, [costs])[:, 0]
        if factors is not None:
            work = work * _by_work(graph, factors[None])[:, 0]
        timed = simulation_of(program, costs, graph, node_seconds(graph, costs, work), limit)
        return timed if factors is None else replace(timed, work=work)
    except NotCompilable:
        raise invalid(program) from None


def makespans(
    program: Program | Sequence[Program], costs: Costs | Sequence[Costs], *, factors: Floats | None = None
) -> Floats:
    """Return the makespan of one program under many costs at once, or of many programs under one Costs.

    For one program pass either a sequence of costs, or one Costs and `factors`. That is an array (samples, compute and
    update actions) that multiplies the seconds of each action, row by row in order. The halves of an overlapped pair
    count separately.

    >>> from drumline.schedules import generate
    >>> program, other = (generate(name, num_ranks=2, num_microbatches=2) for name in ("1f1b", "zb-h1"))
    >>> makespans(program, [Costs(), Costs(forward=2)]).tolist()
    [9.0, 12.0]
    >>> makespans([program, other], Costs()).tolist()
    [9.0, 7.0]
    """
    if not isinstance(program, Program):
        from drumline.core.simulate.many import makespans_of

        if not isinstance(costs, Costs) or factors is not None:
            raise CostsError("many programs were passed with more than one Costs", expected="a single Costs")
        return makespans_of(list(program), costs, lambda each: simulate(each, costs).makespan)
    many = [costs] if isinstance(costs, Costs) else list(costs)
    if not many:
        return np.empty(0)
    kinds = {Messages.of(cost) for cost in many}
    if len(kinds) > 1:
        raise CostsError("some of these costs have finite links and some do not", expected="only one kind in a call")
    try:
        for cost in many:
            graph = compiled(program, cost)
        order = node_order(program, Messages.of(many[0]))
        seconds, lag = _samples(graph, many, factors)
        return latest_ends(order, seconds, lag=lag)
    except NotCompilable:
        raise invalid(program) from None


@once_per_program
def node_order(program: Program, messages: Messages) -> Order:
    """Return an order of the nodes of a program's graph; raise NotCompilable if its actions wait for each other."""
    return order_of(compile_program(program, messages))


def _samples(graph: TimeGraph, many: list[Costs], factors: Floats | None) -> tuple[Floats, Floats | None]:
    """Return seconds and lag of every node, one column per sample."""
    if factors is None:
        plain = all(costs.overlapped is None and costs.reduce == costs.pack == 0.0 for costs in many)
        if graph.messages is Messages.LATENCY and plain:
            seconds = node_seconds(graph, many[0], work_seconds(graph, many))
        else:
            each = [node_seconds(graph, costs, work_seconds(graph, [costs])) for costs in many]
            seconds = np.concatenate(each, axis=1)
        return seconds, lags(graph, many, seconds)
    if len(many) != 1:
        raise CostsError(f"factors was passed with {len(many)} Costs", expected="a single Costs")
    seconds = node_seconds(graph, many[0], work_seconds(graph, many) * _by_work(graph, factors))
    return seconds, lags(graph, many, seconds[:, :1])


def _by_work(graph: TimeGraph, factors: Floats) -> Floats:
    """Return factors (samples, actions row by row) with one column per sample."""
    actions = len(graph.node)
    if factors.ndim != 2 or factors.shape[1] != actions:
        raise CostsError(f"factors has the shape {factors.shape}", expected=f"(samples, {actions}) and a single Costs")
    return factors.T


def compiled(program: Program, costs: Costs) -> TimeGraph:
    """Return a program's graph for costs that fit it; raise NotCompilable if it breaks a rule."""
    graph = compile_program(program, Messages.of(costs))
    if not (graph.plain and in_order(program)) and misplaced_or_misused(program):
        raise NotCompilable
    costs.check_counts(graph.num_stages, program.num_microbatches, program.num_slices)
    for source, target in costs.edges:
        if max(source, target) >= graph.num_ranks:
            raise CostsError(
                f"edges has a link {source}->{target}", expected=f"ranks 0 to {graph.num_ranks - 1}, as in the program"
            )
    return graph


def invalid(program: Program) -> InvalidProgram:
    """Return the error that says which rules a program breaks."""
    violations = validate(program)
    assert violations, f"{program!r} passes the validator but cannot be simulated"
    return InvalidProgram(program.name, violations)
