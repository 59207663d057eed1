"""`schedule="auto"`: measure a few steps, search for a program that fits them, and continue with that program.

    steps 0-1      warm up with a schedule that splits backwards, so that F, I and W are timed separately
    steps 2-6      measured
    before step 7  rank 0 searches within that schedule's memory; all ranks switch to its result
    steps 9-13     measured again; rank 0 prints the gain on stderr
    then           adapting.py watches whether costs change

Gradients are exact before and after, because a program only orders the work.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from drumline.core.measured.costs import costs_of
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.features.adapt.adapting import Adapting
from drumline.plan.search.search import search
from drumline.runtime.step import Step
from drumline.schedules import schedules

_WARM_UPS, _MEASURED = 2, 5
_SECONDS = 5.0  # time limit of the search
_LEAST_GAIN = 0.01  # share of the simulated step; a smaller gain changes nothing


def first_split(stages_per_rank: int | None) -> str:
    """Return the schedule to measure first: the simplest one that splits backwards.

    >>> first_split(None), first_split(2), first_split(3)
    ('zb-h1', 'zb-v', 'interleaved-zb')
    """
    split = (plan for plan in schedules().values() if plan.splits_backward and plan.admits_stages(stages_per_rank or 1))
    return next(split).name


@dataclass
class SearchOutcome:
    """The result of the search, in seconds per step; `gained` is None until it is measured."""

    program: Program
    before: float
    predicted_before: float
    predicted: float
    bound: float
    after: float | None = None

    @property
    def predicted_gain(self) -> float:
        """The share of the simulated step that the new program saves."""
        return 1 - self.predicted / self.predicted_before

    @property
    def gained(self) -> float | None:
        """The share of the measured step that it saved."""
        return None if self.after is None else 1 - self.after / self.before


class AutoSchedule(Observer):
    """Counts steps and switches to a better program when it is time."""

    order: ClassVar[int] = -3

    def __init__(self, site: Site, adapting: Adapting) -> None:
        self.searched: SearchOutcome | None = None
        self.is_over = False
        self._crew, self._ledger, self._frozen, self._choice = site.crew, site.ledger, site.frozen, site.choice
        self._adapting = adapting  # takes over once the search is over
        adapting.is_paused = True
        self._measured_steps: list[Measured] = []
        self._changed: int | None = None  # the first step of the new program

    def before(self, step: Step) -> None:
        """Record the previous step, and take another program if it is time."""
        if self.is_over:
            self._adapting.is_paused = False
            return
        with self._crew.together("the search for a program"):
            begun = step.number - (self._changed or 0)
            if begun > _WARM_UPS and self._crew.rank == 0 and self._crew.axes.number == 0:
                self._measured_steps.append(self._ledger.timeline())
            if begun < _WARM_UPS + _MEASURED:
                return
            if self._changed is not None:
                self._conclude()
            elif (program := self._better(step.number)) is not None:
                self._choice.take(program)

    def moved(self) -> None:
        """Forget what was measured of other stages."""
        self._measured_steps.clear()

    def _better(self, number: int) -> Program | None:
        """Search on rank 0 and return the result on all ranks; None if nothing is better."""
        mine, crew, program = None, self._crew, self._frozen.program
        if crew.rank == 0 and crew.axes.number == 0:
            costs = costs_of(self._measured_steps, quickest=True)
            now = simulate(program, costs)
            result = search(
                costs,
                program.placement,
                num_microbatches=program.num_microbatches,
                limit=Limit(max_activations=max(now.peak_activations)),
                seconds=_SECONDS,
            )
            before = median(step.makespan for step in self._measured_steps)
            self.searched = SearchOutcome(
                result.program, before, now.makespan, result.timeline.makespan, float(result.bound.value)
            )
            better = self.searched.predicted_gain >= _LEAST_GAIN
            print(_said(self.searched, program) if better else _reason_to_stay(self.searched, program), file=sys.stderr)
            mine = result.program if better else None
        program_taken: Program | None = crew.collect("search", mine)[0]
        if crew.axes.is_mesh:
            program_taken = crew.axes.exchanged("drumline/search", program_taken)[crew.axes.lines[0][0]]
        self._measured_steps, self._changed, self.is_over = [], number, program_taken is None
        return program_taken

    def _conclude(self) -> None:
        """Print the measured gain."""
        self.is_over = True
        if self._crew.rank == 0 and self._crew.axes.number == 0:
            assert self.searched is not None, "the program was changed to one that was found"
            self.searched.after = median(step.makespan for step in self._measured_steps)
            gained = self.searched.gained or 0.0
            print(
                f"schedule: a measured step takes {self.searched.after * 1e3:.1f} ms instead of"
                f" {self.searched.before * 1e3:.1f} ms ({-gained:+.1%})",
                file=sys.stderr,
            )


def _said(searched: SearchOutcome, program: Program) -> str:
    before, after = searched.predicted_before * 1e3, searched.predicted * 1e3
    return (
        f"schedule: found a program for the measured stages; in simulation, a step takes {after:.1f} ms"
        f" instead of {before:.1f} ms with {program.name} ({-searched.predicted_gain:+.1%}), in the same"
        f" memory; no program can take less than {searched.bound * 1e3:.1f} ms"
    )


def _reason_to_stay(searched: SearchOutcome, program: Program) -> str:
    return (
        f"schedule: kept {program.name}: the best program found for the measured stages takes"
        f" {searched.predicted * 1e3:.1f} ms instead of {searched.predicted_before * 1e3:.1f} ms; none can take under"
        f" {searched.bound * 1e3:.1f} ms"
    )
