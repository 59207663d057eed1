"""Make a step of endless rows whole, so that it can be simulated: with what came before it and comes after it.

    a step of a schedule without a flush     0F2 0B1 0F3 0B2 0UPDATE1
    whole                                    0F0 0F1 0B0 ... | 0F6 0B5 0F7 0B6 0UPDATE5 | 0B7 0UPDATE7

What is added takes no time. It leaves in flight what is in flight when the step begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.graph import Crossings, Floats
from drumline.core.memory import Holding, holdings
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.attribute import attribute
from drumline.core.timeline.idle import Idle

_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)
Own = list[list[bool]]  # for every row, which actions are the step's own


def is_part(program: Program) -> bool:
    """Whether a program is a step of endless rows, and no program by itself.

    >>> is_part(Program.parse("0F2,0B1,0F3,0B2,0UPDATE1")), is_part(Program.parse("0F0,0B0,0UPDATE0"))
    (True, False)
    """
    return bool(program.num_updates or program.name.endswith(" step")) and bool(validate(program))


def num_begun(program: Program) -> int:
    """Return how many microbatches a program begins: of a step of endless rows, not those that are in flight before.

    >>> num_begun(Program.parse("0F2,0B1,0F3,0B2,0UPDATE1")), num_begun(Program.parse("0F0,0B0,0UPDATE0"))
    (2, 1)
    """
    if not is_part(program):
        return program.num_microbatches
    return sum(row.op is Op.FORWARD for row in program.rows[0])


def whole(program: Program, in_flight: Sequence[int] | None = None) -> tuple[Program, Own]:
    """Return a whole program around a step, and which of its actions are the step's own.

    Before it come steps like it, as often as its weight versions go back. A step that fills the pipeline has none like
    it before: there, `in_flight` says how many microbatches each rank had in flight when it began, -1 for a frozen one.

    >>> timeline, own_flags = whole(Program.parse("0F2,0B1,0F3,0B2,0UPDATE1"))
    >>> print(timeline); own_flags[0].index(True), own_flags[0].count(True)
    0F0,0F1,0B0,0F2,0B1,0F3,0B2,0UPDATE1,0F4,0B3,0F5,0B4,0UPDATE3,0F6,0B5,0F7,0B6,0UPDATE5,0B7,0UPDATE7
    (13, 5)
    """
    counts = [(sum(action.op is Op.FORWARD for action in row), sum(action.op in _BACKWARDS for action in row))
              for row in program.rows]  # fmt: skip
    started = in_flight or [0 if backwards else -1 for _, backwards in counts]
    keeps = [held_pairs >= 0 for held_pairs in started]
    if all(backwards == forwards * keep for (forwards, backwards), keep in zip(counts, keeps, strict=True)):
        before = _steps_like(program, counts[0][0])
    else:
        before = _microbatches_before(program, started)
    shift = max(action.microbatch or 0 for row in before for action in row) + 1 - _begun(program.rows[0])
    rows, own_flags = [], []
    for first, row, keep in zip(before, program.rows, keeps, strict=True):
        moved = [action._replace(microbatch=(action.microbatch or 0) + shift) for action in row]
        left = _left([*first, *moved], _back_of(program, row[0].stage)) if keep else []
        rows.append([*first, *moved, *left])
        own_flags.append([False] * len(first) + [True] * len(row) + [False] * len(left))
    return Program.of(rows, program.name), own_flags


def _begun(row: Sequence[Action]) -> int:
    """Return the first microbatch that a row's forwards begin."""
    return min(action.microbatch or 0 for action in row if action.op is Op.FORWARD)


def _back_of(program: Program, stage: int) -> Op:
    ops = (action.op for row in program.rows for action in row if action.stage == stage and action.op in _BACKWARDS)
    return next(ops, Op.BACKWARD)


def _steps_like(program: Program, per_step: int) -> list[list[Action]]:
    """Return the rows of steps like this one, from an empty pipeline up to it."""
    steps = 2 * (_begun(program.rows[0]) // per_step) + 1
    rows: list[list[Action]] = []
    for row in program.rows:
        begun = _begun(row)
        moved = ((action, (action.microbatch or 0) - begun + at * per_step) for at in range(steps) for action in row)
        rows.append([action._replace(microbatch=microbatch) for action, microbatch in moved if microbatch >= 0])
    return rows


def _microbatches_before(program: Program, in_flight: Sequence[int]) -> list[list[Action]]:
    """Return rows of microbatches one after the other, of which so many stay in flight."""
    rows = []
    for rank, row in enumerate(program.rows):
        stage, begun = row[0].stage, _begun(row)
        first = min((other.microbatch or 0 for other in row if other.op in _BACKWARDS), default=begun - in_flight[rank])
        first = 0 if in_flight[rank] < 0 else first
        timeline = []
        for at in range(begun):
            ops = (Op.FORWARD, _back_of(program, stage)) if at < first else (Op.FORWARD,)
            timeline += [Action(stage, op, at) for op in ops]
        rows.append(timeline)
    return rows


def _left(row: Sequence[Action], back: Op) -> list[Action]:
    """Return what a row lacks to be whole: backwards of all that it has begun, and a last update."""
    there = {(action.op, action.microbatch) for action in row}
    stage, begun = row[0].stage, sorted(action.microbatch or 0 for action in row if action.op is Op.FORWARD)
    left = [Action(stage, back, at) for at in begun if (back, at) not in there]
    updates = back is Op.BACKWARD and (Op.UPDATE, begun[-1]) not in there
    return [*left, Action(stage, Op.UPDATE, begun[-1])] if updates else left


def held_in_part(program: Program, in_flight: Sequence[int]) -> tuple[Holding, ...]:
    """Return what every rank holds in a step, with what was in flight when it began.

    >>> held_in_part(Program.parse("0F2,0B1,0F3,0B2,0UPDATE1"), [1])[0].pairs
    [(2, 2), (2, 1), (2, 2), (2, 1), (1, 1)]
    """
    timeline, own_flags = whole(program, in_flight)
    return tuple(
        replace(holding, pair_counts=holding.pair_counts[np.array(flags, dtype=bool)])
        for holding, flags in zip(holdings(timeline, Costs()), own_flags, strict=True)
    )


@dataclass(frozen=True, eq=False, repr=False)
class PartSimulation(Simulation):
    """A step of endless rows: what comes before and after it was simulated too, and is left out here."""

    @cached_property
    def start(self) -> float:
        """When the first action starts."""
        return min(track.starts[0] for track in self.tracks)

    @cached_property
    def end(self) -> float:
        """When the last action ends."""
        return max(track.ends[-1] for track in self.tracks)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each rank computed in what is shown: the graph's arrays have all."""
        return super(Simulation, self).busy

    @cached_property
    def causes(self) -> Sequence[Idle]:
        """Every idle interval with its cause, of the actions that are shown: the graph's arrays have all."""
        return attribute(self, self.limit)

    @cached_property
    def balanced(self) -> None:
        """None: what is left out takes no time, so that an average says nothing."""
        return


def simulate_part(
    program: Program, costs: Costs, seconds: Floats, in_flight: Sequence[int] | None, weighed: Sequence[Holding]
) -> PartSimulation:
    """Simulate a step of endless rows, whose actions take these seconds; `weighed` is what ranks held."""
    timeline, own_flags = whole(program, in_flight)
    mine = np.array([flag for row in own_flags for flag in row])
    factors = np.zeros(timeline.num_actions)
    factors[mine] = seconds
    simulation = simulate(timeline, costs, factors=factors)
    graph = simulation.graph
    nodes = tuple(each[np.array(flags)] for each, flags in zip(graph.action_nodes, own_flags, strict=True))
    is_shown = np.zeros(graph.num_nodes, dtype=bool)
    is_shown[np.concatenate(nodes)] = True
    crossings = graph.crossings
    both = is_shown[graph.node[crossings.producer]] & is_shown[graph.node[crossings.consumer]]
    left = Crossings(*(column[both] for column in crossings))
    began = min(float(simulation.started[each[0]]) for each in nodes)
    cut = replace(graph, action_nodes=nodes, crossings=left)
    return PartSimulation(program, costs, cut, simulation.ended - began, simulation.lag, weighed=weighed)
