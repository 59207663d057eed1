"""`schedule="auto"`: measure a few steps, search for a program that fits them, and continue with that program.

    steps 0-6      the first program: two steps warm up, five are measured
    steps 7-13     the same order with the other form of backwards, whole or in halves: what a half takes is not a guess
    before step 14 rank 0 searches within the first program's memory; all ranks switch to its result
    steps 14-20    measured again; rank 0 prints the gain on stderr
    before step 21 back to the quicker form, unless the measured step is shorter
    then           auto_slices.py tries slices of sequences, where microbatches are few
                   adapting.py watches whether costs change

Gradients are exact before and after, because a program only orders the work. The stages stay where they are: other
places are for the set-up.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, TypeVar

from drumline.adapt.repair import is_split
from drumline.core.costs import Costs
from drumline.core.measured.costs import costs_of
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.features.adapt.adapting import Adapting
from drumline.features.adapt.backward_forms import joint_costs, other_form
from drumline.plan.search.search import search
from drumline.plan.slices.orders import orders_in_slices
from drumline.runtime.step import Step
from drumline.schedules import schedules

T = TypeVar("T")

WARM_UPS, MEASURED = 2, 5
_SECONDS = 5.0  # time limit of the search
LEAST_GAIN = 0.01  # share of the simulated step; a smaller gain changes nothing


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
    is_kept: bool = True  # False once its measured step was no shorter

    @property
    def predicted_gain(self) -> float:
        """The share of the simulated step that the new program saves."""
        return 1 - self.predicted / self.predicted_before

    @property
    def gained(self) -> float | None:
        """The share of the measured step that it saved."""
        return None if self.after is None else 1 - self.after / self.before


def answer_of_first(crew: Crew, mine: T) -> T:
    """Return what the first rank says, on all ranks of all lines."""
    said: T = crew.collect("search", mine)[0]
    if crew.axes.is_mesh:
        said = crew.axes.exchanged("drumline/search", said)[crew.axes.lines[0][0]]
    return said


class AutoSchedule(Observer):
    """Counts steps and switches to a better program when it is time."""

    order: ClassVar[int] = -3

    def __init__(self, site: Site, adapting: Adapting, program: Program) -> None:
        self.searched: SearchOutcome | None = None
        self.is_over = False
        self._crew, self._ledger, self._frozen, self._choice = site.crew, site.ledger, site.frozen, site.choice
        adapting.is_paused = True  # until the search is over, and that for slices too
        self._measured_steps: list[Measured] = []
        self._num_run = 0  # the number of steps by the program that is measured
        self._forms: list[tuple[Program, list[Measured]]] = []  # as taken up, the first program's before the other's
        self._program = program  # of these, the last
        self.program = program  # what steps run by, as it was taken up
        self._is_searched = False

    def before(self, step: Step) -> None:
        """Record the previous step, and take up another program if it is time."""
        if self.is_over:
            return
        with self._crew.together("the search for a program"):
            if self._num_run > WARM_UPS and self._decides:
                self._measured_steps.append(self._ledger.timeline())
            self._num_run += 1
            if self._num_run <= WARM_UPS + MEASURED:
                return
            program = self._next()
            self._measured_steps, self._num_run = [], 1
            if program is not None:
                self._choice.take(program)

    @property
    def _decides(self) -> bool:
        return self._crew.rank == self._crew.axes.number == 0

    def _next(self) -> Program | None:
        """Return the program to take up now on all ranks; None to stay with this one."""
        if self._is_searched:
            self.is_over = True
            return answer_of_first(self._crew, self._concluded() if self._decides else None)
        self._forms.append((self._program, self._measured_steps))
        if len(self._forms) == 1 and (other := self._other_form()) is not None:
            self._program = other
            return other
        self._is_searched = True
        best, better = self._better() if self._decides else (None, False)
        program, goes_on = answer_of_first(self._crew, (best, better))
        self.is_over = not goes_on
        return program

    def _other_form(self) -> Program | None:
        """Return the first program with the other form of backwards; None if it runs as the same rows."""
        other = other_form(self._program)
        runs = [self._frozen.pruned_too(program).rows for program in (self._program, other)]
        return other if runs[0] != runs[1] else None

    def moved(self) -> None:
        """Begin again: what was measured is of other stages."""
        self._measured_steps, self._num_run = [], 0
        self._forms.clear()
        self.is_over = self.is_over or self._is_searched

    def took(self, program: Program, number: int) -> None:
        """Note what was taken up, here or elsewhere."""
        self.program = program

    @property
    def first(self) -> Program:
        """The program to which memory is limited."""
        return self._forms[0][0]

    def costs(self) -> Costs:
        """Return the costs of both forms of backwards, if both were measured; on the rank that decides."""
        each = {is_split(program): costs_of(steps, quickest=True) for program, steps in self._forms}
        if len(each) < 2:
            return next(iter(each.values()))
        return joint_costs(each[True], each[False], self._program.num_stages)

    def _quicker(self) -> tuple[Program, float]:
        """Return the form with the shorter step, and that step; the first one in doubt."""
        each = [(program, median(step.makespan for step in steps)) for program, steps in self._forms]
        return min(each, key=lambda form: form[1] * (1 - LEAST_GAIN * (form is each[0])))

    def _better(self) -> tuple[Program | None, bool]:
        """Search, and return the program to take up, if it is not this one, and whether the search found it."""
        costs, (best, before) = self.costs(), self._quicker()
        now = simulate(self._frozen.pruned_too(best), costs)
        program, predicted, bound = self._searched(costs)
        self.searched = SearchOutcome(program, before, now.makespan, predicted, bound)
        better = self.searched.predicted_gain >= LEAST_GAIN
        print(_said(self.searched, best) if better else _reason_to_stay(self.searched, best), file=sys.stderr)
        return (program, True) if better else (None if best is self._program else best, False)

    def _searched(self, costs: Costs) -> tuple[Program, float, float]:
        """Return the best program within the first one's memory, its simulated step, and what none can beat.

        In slices that the user asked for, it is the best of the schedules that are tried in slices.
        """
        first = self.first
        most = max(simulate(self._frozen.pruned_too(first)).peak_activations)
        if first.num_slices == 1:
            limit = Limit(max_activations=most)
            result = search(
                costs, first.placement, num_microbatches=first.num_microbatches, limit=limit, seconds=_SECONDS
            )
            return result.program, result.timeline.makespan, float(result.bound.value)
        each = [
            (simulate(self._frozen.pruned_too(order), costs), order)
            for order in (first, *orders_in_slices(first, first.num_slices))
        ]
        timeline, order = min(
            (pair for pair in each if max(pair[0].peak_activations) <= most), key=lambda pair: pair[0].makespan
        )
        return order, timeline.makespan, max(timeline.busy)

    def _concluded(self) -> Program | None:
        """Print the measured gain; return the program to go back to, if there is none."""
        assert self.searched is not None, "the program was changed to one that was found"
        self.searched.after = median(step.makespan for step in self._measured_steps)
        gained = self.searched.gained or 0.0
        self.searched.is_kept = gained > 0
        best, _ = self._quicker()
        back = "" if gained > 0 else f"; back to {best.name}"
        print(
            f"schedule: a measured step takes {self.searched.after * 1e3:.1f} ms instead of"
            f" {self.searched.before * 1e3:.1f} ms ({-gained:+.1%}){back}",
            file=sys.stderr,
        )
        return None if gained > 0 else best


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
