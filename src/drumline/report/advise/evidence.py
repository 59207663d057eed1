"""What is known of a step that could be changed: the evidence that predictions of a gain rest on.

A prediction is the difference of two simulations with the step's own seconds, as a part of the measured makespan. What
the simulator does not know, the executor's own time, is taken to stay with every action.

    measured   ├────────── simulated ──────────┤── overhead ──┤
    changed    ├──── simulated ─────┤── overhead ──┤              the gain is what the second is shorter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.timeline import Timeline

OPS = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class Evidence:
    """A step as it was measured, `simulated` with the same seconds of every action, and what stages and edges cost.

    What a source does not know is None or empty here, and remedies that need it are left out.
    """

    measured: Timeline
    simulated: Simulation
    costs: Costs  # in the middle
    step: int
    plan: Mapping[str, Any] | None = None  # what the pipeline was told; None where it is not ours
    metrics: Sequence[Mapping[str, Any]] = ()  # of the run's steps
    kinds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of overhead, by rank, the largest first

    @property
    def program(self) -> Program:
        """What ran."""
        return self.measured.program

    @property
    def line(self) -> Mapping[str, Any]:
        """What the metrics say of the step; empty where they say nothing."""
        return next((one for one in self.metrics if one["step"] == self.step), {})

    @cached_property
    def middle(self) -> Simulation:
        """The step with what stages and edges cost in the middle: what changes are held against."""
        return simulate(self.program, self.costs)

    @property
    def overhead(self) -> float:
        """Seconds by which the step was longer than in the simulator: the executor's own, and jitter of messages."""
        return max(self.measured.makespan - self.simulated.makespan, 0.0)

    @cached_property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds of one microbatch in every stage, forward and backward."""
        each = [self.costs.per_stage(name, self.program.num_stages) for name in OPS]
        return tuple(map(sum, zip(*each, strict=True)))

    @cached_property
    def rank_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes for one microbatch, on average over them."""
        found = [0.0] * self.program.num_ranks
        for stage, seconds in enumerate(self.stage_seconds):
            ranks = self.program.placement.ranks_of(stage)
            for rank in ranks:
                found[rank] += seconds / len(ranks)
        return tuple(found)
