"""What is known about a step: the evidence for predicted gains.

A prediction is the difference between two simulations with the step's own seconds, as a share of the measured makespan.
It assumes that the executor's own time, which the simulator does not model, stays the same for every action.

    measured   ├────────── simulated ──────────┤── overhead ──┤
    changed    ├──── simulated ─────┤── overhead ──┤              the gain is the difference
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
    """A measured step, `simulated` with the same seconds of every action, and the costs of stages and edges.

    Unknown values are None or empty, and remedies that need them are left out.
    """

    measured: Timeline
    simulated: Simulation
    costs: Costs  # medians
    step: int
    plan: Mapping[str, Any] | None = None  # the pipeline's settings; None if it is not ours
    metrics: Sequence[Mapping[str, Any]] = ()  # the run's steps
    kinds: Mapping[str, Sequence[float]] = field(default_factory=dict)  # overhead by kind and rank, the largest first

    @property
    def program(self) -> Program:
        """What ran."""
        return self.measured.program

    @property
    def line(self) -> Mapping[str, Any]:
        """The metrics of the step; empty if there are none."""
        return next((metric for metric in self.metrics if metric["step"] == self.step), {})

    @cached_property
    def middle(self) -> Simulation:
        """The step simulated with the median costs of stages and edges: the baseline for changes."""
        return simulate(self.program, self.costs)

    @property
    def overhead(self) -> float:
        """Seconds that the step took longer than in the simulator: the executor's own time, and message jitter."""
        return max(self.measured.makespan - self.simulated.makespan, 0.0)

    def share_saved(self, before: float, after: float, actions: float) -> float:
        """Return what a change saves of the measured step, from two simulations.

        The new program has `actions` times as many actions, each with its own overhead.
        """
        return (before - after + self.overhead * (1 - actions)) / self.measured.makespan

    @cached_property
    def stage_seconds(self) -> tuple[float, ...]:
        """Seconds of one microbatch in every stage, forward and backward."""
        each = [self.costs.per_stage(name, self.program.num_stages) for name in OPS]
        return tuple(map(sum, zip(*each, strict=True)))

    @cached_property
    def rank_seconds(self) -> tuple[float, ...]:
        """Seconds that each rank computes per microbatch, on average."""
        rank_seconds = [0.0] * self.program.num_ranks
        for stage, seconds in enumerate(self.stage_seconds):
            ranks = self.program.placement.ranks_of(stage)
            for rank in ranks:
                rank_seconds[rank] += seconds / len(ranks)
        return tuple(rank_seconds)
