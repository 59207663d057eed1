"""What a search minimises: a number for rows.

    makespan    first start to last end over all ranks
    span        the longest rank's own first start to last end, as in the zero-bubble papers
    steady      seconds from one step to the next, if each rank begins its next step as soon as it finishes this one:
                the cost of a program whose drain overlaps the fill of the next step

Under jitter, random factors multiply every action's seconds, the same factors for all programs, and the number is a
quantile of the makespans (spans, steps) over the samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from drumline.core.errors import CostsError, nearest
from drumline.core.graph import Floats, Messages
from drumline.plan.search.bounds.instance import B, I, Instance, Rows
from drumline.plan.search.packed import OBJECTIVES as OBJECTIVES
from drumline.plan.search.packed import PackedInstance
from drumline.plan.search.row_times import Ends, clock, clock_many

_STEPS = 12  # after this many steps the time of a step has settled, or oscillates around its mean


@dataclass(frozen=True, slots=True)
class Jitter:
    """How much seconds vary from action to action: the relative standard deviation, for all stages or for each.

    The factors are log-normal with mean 1. `quantile` 0.9 minimises the 90th percentile of the step time.
    """

    spread: float | Sequence[float] = 0.1
    quantile: float = 0.9
    num_samples: int = 64
    seed: int = 0

    def factors(self, instance: Instance) -> Floats:
        """Return one factor per action and sample; a whole backward uses the factor of its I."""
        stages = instance.num_stages
        spread = [self.spread] * stages if isinstance(self.spread, float | int) else list(self.spread)
        if len(spread) != stages:
            raise CostsError(
                f"jitter has {len(spread)} values", expected=f"one number, or one for each of the {stages} stages"
            )
        per_action = np.repeat(np.array(spread, dtype=float), 4 * instance.num_microbatches)[:, None]
        sigma = np.sqrt(np.log1p(per_action**2))
        drawn = np.random.default_rng(self.seed).standard_normal((instance.num_actions, self.num_samples))
        factors: Floats = np.exp(sigma * drawn - sigma**2 / 2)
        factors[B::4] = factors[I::4]
        return factors


@dataclass(frozen=True, slots=True)
class Score:
    """The value of rows, every rank's first start and last end, and when each action's output can be used."""

    value: float
    ends: Ends
    ready: list[float]


class Objective:
    """Measures rows of one instance.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> value = Instance(Costs(), Placement.linear(2), num_microbatches=1)
    >>> [Objective(value, name).measure(value.rows_of(value.plain)).value for name in OBJECTIVES]
    [5.0, 5.0, 5.0]
    """

    def __init__(self, instance: Instance, name: str = "makespan", jitter: Jitter | None = None) -> None:
        if name not in OBJECTIVES:
            raise CostsError(f"unknown objective {name!r}", fix=nearest(name, OBJECTIVES))
        self.instance, self.name, self.jitter = instance, name, jitter
        self._begin = [0.0] * instance.num_ranks
        # If stages have copies, their gradients are exchanged after the last actions of both ranks.
        exchanged = instance.costs.per_stage("reduce", instance.num_stages)
        copied = bool(instance.placement.mirrored)
        self._clock = clock(instance, until_sent=name == "makespan" and copied and max(exchanged) > 0)
        self._after = [max(exchanged[lane.stage] for lane in lanes) if copied else 0.0 for lanes in instance.lanes]
        self._many = None if jitter is None else clock_many(instance, jitter.factors(instance))

    @cached_property
    def packed(self) -> PackedInstance | None:
        """The instance and this objective for the kernel; None if only Python can measure it."""
        if self.jitter is not None or self.instance.messages is Messages.BLOCKING:
            return None
        return PackedInstance(self.instance, self.name, self._after)

    def measure(self, rows: Rows) -> Score | None:
        """Return the score of the rows; None if ranks wait for each other."""
        times = self._clock(rows, self._begin)
        if times is None:
            return None
        ends, ready = times
        if self._many is not None and self.jitter is not None:
            many = self._many(rows, np.zeros((len(rows), self.jitter.num_samples)))
            return Score(float(np.quantile(self._of_many(rows, *many), self.jitter.quantile)), ends, ready)
        return Score(self.of_ends(rows, ends), ends, ready)

    def of_ends(self, rows: Rows, ends: Ends) -> float:
        """Return the value of rows that start and end at these times."""
        if self.name == "makespan":
            return max(end + self._after[rank] for rank, (_, end) in enumerate(ends))
        if self.name == "span":
            return max(end - start for start, end in ends)
        return self._steady(rows, ends)

    def longest(self, ends: Ends) -> int:
        """Return the rank whose end determines the value."""
        if self.name == "makespan":
            return max(range(len(ends)), key=lambda rank: ends[rank][1] + self._after[rank])
        return max(range(len(ends)), key=lambda rank: ends[rank][1] - ends[rank][0])

    def _steady(self, rows: Rows, ends: Ends) -> float:
        lasts = [[end for _, end in ends]]
        for _ in range(_STEPS):
            times = self._clock(rows, lasts[-1])
            assert times is not None
            lasts.append([end for _, end in times[0]])
            steps = [after - before for before, after in zip(lasts[-2], lasts[-1], strict=True)]
            if max(steps) - min(steps) <= 1e-9 * max(steps):
                return max(steps)
        half = len(lasts) // 2
        return max(after - before for before, after in zip(lasts[half], lasts[-1], strict=True)) / (
            len(lasts) - 1 - half
        )

    def _of_many(self, rows: Rows, first: Floats, last: Floats) -> Floats:
        """Return the value of every sample."""
        if self.name == "makespan":
            value: Floats = (last + np.array(self._after)[:, None]).max(axis=0)
        elif self.name == "span":
            value = (last - first).max(axis=0)
        else:
            assert self._many is not None
            begun = last
            for _ in range(_STEPS):
                last = self._many(rows, last)[1]
            value = (last - begun).max(axis=0) / _STEPS
        return value
