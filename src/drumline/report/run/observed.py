"""A run as it is reported: one of its steps as it was measured, the same in the simulator, and what stages cost.

The step is the typical one unless another is asked for: in the middle by its makespan, the first step, which warms up,
aside. Costs are the middle of steps like it, so that one that was disturbed does not decide what is advised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from drumline.core.costs import Costs
from drumline.core.measured.costs import costs_of
from drumline.core.measured.measured import Measured
from drumline.core.measured.replay import replay
from drumline.core.measured.run import Run
from drumline.core.simulate.simulate import Simulation, simulate

MAKESPAN = "pp/makespan_seconds"
_POOLED = 15  # steps whose seconds are taken together


@dataclass(frozen=True)
class Observed:
    """One step of a run: `measured`, `simulated` with the same seconds; `costs` are those of `pooled` steps like it."""

    run: Run
    step: int
    measured: Measured
    pooled: tuple[int, ...]
    metrics: Sequence[dict[str, Any]]

    @cached_property
    def simulated(self) -> Simulation:
        """The step with the measured seconds of every action, as soon as inputs allow."""
        return replay(self.measured)

    @cached_property
    def costs(self) -> Costs:
        """What stages and edges cost in the middle."""
        return costs_of(self._timelines)

    @cached_property
    def middle(self) -> Simulation:
        """The step with what stages and edges cost in the middle: what changes are held against."""
        return simulate(self.run.program, self.costs)

    @property
    def overhead(self) -> float:
        """Seconds by which the step was longer than in the simulator: the executor's own, and jitter of messages."""
        return max(self.measured.makespan - self.simulated.makespan, 0.0)

    @cached_property
    def _timelines(self) -> list[Measured]:
        return [self.measured if step == self.step else self.run.timeline(step) for step in self.pooled]

    @cached_property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds of one microbatch in every stage, forward and backward."""
        stages = self.run.program.num_stages
        each = [self.costs.per_stage(name, stages) for name in ("forward", "backward_input", "backward_weight")]
        return tuple(map(sum, zip(*each, strict=True)))

    @cached_property
    def rank_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes for one microbatch, on average over them."""
        program = self.run.program
        found = [0.0] * program.num_ranks
        for stage, seconds in enumerate(self.stage_seconds):
            ranks = program.placement.ranks_of(stage)
            for rank in ranks:
                found[rank] += seconds / len(ranks)
        return tuple(found)


def observe(run: Run, step: int | None = None) -> Observed:
    """Return what a report is made from; RecordError says what is missing."""
    steps, metrics = run.steps, run.metrics()
    near = [step] if step is not None else _typical(metrics, steps)
    chosen = near[len(near) // 2] if near else None
    timeline = run.timeline(chosen)
    number = timeline.records[0].step
    return Observed(run, number, timeline, tuple(near or [number]), metrics)


def _typical(metrics: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[int]:
    """Return the steps around the one in the middle, by their makespan.

    >>> _typical([{"step": at, MAKESPAN: seconds} for at, seconds in enumerate((90, 5, 3, 4))], range(4))
    [2, 3, 1]
    """
    known = set(steps)
    timed = [(one[MAKESPAN], one["step"]) for one in metrics if one.get(MAKESPAN) is not None and one["step"] in known]
    ordered = [step for _, step in sorted(timed[1:] or timed)]
    first = max(0, (len(ordered) - _POOLED) // 2)
    return ordered[first : first + _POOLED]
