"""How long the stages of a timeline take, and what their times mean for another order of the same work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.timeline import Timeline


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The median seconds that one microbatch takes of a stage, by op; None for what never ran alone."""

    stage: int
    forward: float | None
    backward: float | None
    backward_input: float | None
    backward_weight: float | None

    @property
    def total(self) -> float:
        """Seconds of a microbatch, forward and backward."""
        halves = (self.backward_input or 0.0) + (self.backward_weight or 0.0)
        return (self.forward or 0.0) + (halves or self.backward or 0.0)


def stage_seconds(timeline: Timeline) -> tuple[StageSeconds, ...]:
    r"""Return what each stage takes; a pair that ran as one counts half for each of its parts.

    >>> from drumline.core.program import Program
    >>> timeline = simulate(Program.parse("0F0,0B0\n1F0,1B0"), Costs(forward=[1, 3], backward=[2, 6]))
    >>> [one.total for one in stage_seconds(timeline)]
    [3.0, 9.0]
    """
    found: dict[tuple[int, Op], list[float]] = {}
    for track in timeline.tracks:
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            for part in action.work:
                found.setdefault((part.stage, part.op), []).append((end - start) / len(action.work))
    of = {key: median(values) for key, values in found.items()}
    ops = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
    return tuple(
        StageSeconds(stage, *(of.get((stage, op)) for op in ops)) for stage in range(timeline.program.num_stages)
    )


def slowest(stages: Sequence[StageSeconds]) -> StageSeconds:
    """Return the stage that takes longest."""
    return max(stages, key=lambda one: one.total)


def costs_of(stages: Sequence[StageSeconds]) -> Costs:
    """Return the stages' seconds as costs; of a backward that never ran in two, both halves are taken as equal."""

    def half(one: StageSeconds, alone: float | None, other: float | None) -> float:
        return alone if alone is not None else max((one.backward or 0.0) - (other or 0.0), 0.0) / (1 if other else 2)

    return Costs(
        forward=[one.forward or 0.0 for one in stages],
        backward_input=[half(one, one.backward_input, one.backward_weight) for one in stages],
        backward_weight=[half(one, one.backward_weight, one.backward_input) for one in stages],
        backward=[
            one.backward if one.backward is not None else (one.backward_input or 0.0) + (one.backward_weight or 0.0)
            for one in stages
        ],
    )


def replayed(timeline: Timeline) -> Simulation:
    r"""Return the ideal for a timeline's own action times: the same order, no transfer, no overhead.

    >>> from drumline.core.program import Program
    >>> timeline = simulate(Program.parse("0F0,0B0\n1F0,1B0"), Costs(comm=0.5))
    >>> timeline.makespan, replayed(timeline).makespan
    (7.0, 6.0)
    """
    seconds = [
        (end - start) / len(action.work)
        for track in timeline.tracks
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True)
        for _ in action.work
    ]
    return simulate(timeline.program, Costs(backward=1), factors=np.array(seconds))
