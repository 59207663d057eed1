"""What could be changed about a step, and what that is predicted to gain: the evidence, remedies, advice.

A prediction is the difference of two simulations with the step's own seconds, as a part of the measured makespan. What
the simulator does not know, the executor's own time, is taken to stay with every action.

    measured   ├────────── simulated ──────────┤── overhead ──┤
    changed    ├──── simulated ─────┤── overhead ──┤              the gain is what the second is shorter
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.timeline import Timeline

LEAST_GAIN = 0.01  # of the makespan; less is no reason to change anything
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


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change: a sentence, the share of the makespan it is predicted to save, and what to pass to `Pipeline`.

    `assumes` is what the prediction takes for true beyond what was measured.
    """

    kind: str
    sentence: str
    gain: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumes: str = ""

    @property
    def weight(self) -> float:
        """How much it counts against others: a gain that rests on an assumption counts half."""
        return self.gain / 2 if self.assumes else self.gain

    def __str__(self) -> str:
        return self.sentence + (f" ({self.assumes})" if self.assumes else "")


@dataclass(frozen=True, slots=True)
class Advice:
    """Remedies, the one that counts most first; `nothing` is what to say where none gains the `least` of all."""

    remedies: tuple[Remedy, ...]
    least: float = LEAST_GAIN
    nothing: str = f"No change that was tried is predicted to gain {LEAST_GAIN:.0%} or more."

    @property
    def best(self) -> Remedy | None:
        """The one to take first; None where nothing is predicted to gain."""
        first = self.remedies[0] if self.remedies else None
        return first if first is not None and first.gain >= self.least else None

    @property
    def sentence(self) -> str:
        """What to do."""
        return self.nothing if self.best is None else f"{self.best}."

    @property
    def others(self) -> tuple[Remedy, ...]:
        """What else there is to say."""
        return self.remedies if self.best is None else self.remedies[1:]

    def __str__(self) -> str:
        return " ".join([self.sentence, *(f"{one}." for one in self.others)])

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for JSON."""
        return {"sentence": self.sentence, "remedies": [asdict(one) for one in self.remedies]}


def predicted(gain: float) -> str:
    """Return a gain as it is written: how the step's seconds change.

    >>> predicted(0.137)
    'predicted -14%'
    """
    return f"predicted {-gain:+.0%}"
