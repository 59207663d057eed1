"""`schedule="auto"` where microbatches are few: try slices of sequences, and keep them if measured steps get shorter.

::

    after the search    slices that cost nothing are simulated with the measured stages: is there a gain at all?
                        if so, this step's forwards run whole and in slices: do these compute the same?
    7 steps             the program that the search left, measured again: the next ones compare with these
    7 steps             the best order in a few slices: what short slices take is measured, and no guess
    7 steps             another number of slices or order, if these times promise more by it
    then                the quickest of them, in slices or in one piece; rank 0 says the measured gain on stderr

Nothing but `Site.slicings` knows of models and batches. A program in slices orders the same work, so all ranks take it
up between two steps like any other. Every step of a trial trains, and its gradients are those of whole sequences.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import ClassVar

from drumline.adapt.repair import is_split
from drumline.core.costs import Costs
from drumline.core.measured.costs import costs_of
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.slices.curve import fitted_curve
from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.features.adapt.adapting import Adapting
from drumline.features.adapt.auto_schedule import LEAST_GAIN, MEASURED, WARM_UPS, AutoSchedule, answer_of_first
from drumline.plan.slices.orders import NUMBERS, are_few, orders_in_slices
from drumline.runtime.step import Step

_PROBE = 4  # slices to measure first: enough for a gain, and not so short that they only cost
_TOKENS = max(NUMBERS)  # of a sequence, in the unit of the curve: the shortest slice that is tried


@dataclass
class SlicesOutcome:
    """What slices gained, in seconds per step: the best program in slices, and whether it stays.

    `predicted` is what it was expected to take before it was measured, by what other slices took; None for the first.
    """

    program: Program
    before: float
    after: float
    predicted: float | None
    is_kept: bool

    @property
    def gained(self) -> float:
        """The share of the measured step that it saved."""
        return 1 - self.after / self.before


@dataclass(frozen=True)
class TimedProgram:
    """A program as taken up, and its measured steps."""

    program: Program
    steps: list[Measured]
    predicted: float | None = None

    @property
    def seconds(self) -> float:
        """Its step."""
        return median(step.makespan for step in self.steps)


class AutoSlices(Observer):
    """Counts steps after the search of a program, and takes up slices where they pay."""

    order: ClassVar[int] = 9  # after all others that look at a step, which is of the program before

    def __init__(self, site: Site, auto: AutoSchedule, adapting: Adapting) -> None:
        self.outcome: SlicesOutcome | None = None
        self.is_over = False
        self._site, self._crew, self._auto, self._adapting = site, site.crew, auto, adapting
        self._orders: dict[int, list[Program]] = {}  # by numbers of slices
        self._runs: list[TimedProgram] = []
        self._steps: list[Measured] = []
        self._num_run = 0
        self._now: Program | None = None  # what is measured; None until slices are tried
        self._predicted: float | None = None  # its step, on rank 0
        self._takes = False  # whether a program is taken up here

    def after(self, step: Step) -> None:
        """Measure a step, and take up another program if it is time."""
        if self.is_over or not self._auto.is_over:
            return
        with self._crew.together("the search for slices"):
            if self._now is None:
                self._begin()
                return
            if step.program != self._site.programs.own_number:
                return  # whole sequences for this step alone
            if self._num_run >= WARM_UPS and self._decides:
                self._steps.append(self._site.ledger.timeline())
            self._num_run += 1
            if self._num_run == WARM_UPS + MEASURED:
                self._go_on()

    def took(self, program: Program, number: int) -> None:
        """Leave it to others if they take up a program meanwhile."""
        if self._now is not None and not self._takes and not self.is_over:
            self._end()

    def moved(self) -> None:
        """Leave it: what was measured is of other stages."""
        if self._auto.is_over and not self.is_over:
            self._end()

    @property
    def _decides(self) -> bool:
        return self._crew.rank == self._crew.axes.number == 0

    # ---- whether to try ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Find out whether slices could pay and the model runs in them; all ranks do it alike."""
        program = self._auto.program
        if program.num_slices == 1 and are_few(program):
            self._orders = {number: orders for number in NUMBERS if (orders := self._fitting(program, number))}
        pays = bool(self._orders) and self._could_pay(program) if self._decides else False
        if not answer_of_first(self._crew, pays):
            self._end()
            return
        numbers, why = self._site.slicings({number: orders[0] for number, orders in self._orders.items()})
        if not numbers:
            self._say(f"no slices of sequences: {why}")
            self._end()
            return
        self._orders = {number: self._orders[number] for number in numbers}
        self._now = program

    def _could_pay(self, program: Program) -> bool:
        """Whether slices that cost nothing would take a shorter step."""
        costs = self._auto.costs()
        now = self._simulated(program, costs)
        return any(
            self._best(costs, lambda number: None, number)[1] < now * (1 - LEAST_GAIN) for number in self._orders
        )

    # ---- trials ------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take up the next program to measure, or the quickest."""
        assert self._now is not None, "a program was measured"
        self._runs.append(TimedProgram(self._now, self._steps, self._predicted))
        self._steps, self._num_run = [], 0
        following: Program | None = None
        if self._decides and len(self._runs) < 3:
            following = self._first_try() if len(self._runs) == 1 else self._second_try()
        following = answer_of_first(self._crew, following)
        if following is None:
            self._conclude()
        else:
            self._take(following)

    def _first_try(self) -> Program:
        number = min(self._orders, key=lambda number: (abs(number - _PROBE), number))
        return self._best(self._auto.costs(), lambda number: None, number)[0]

    def _second_try(self) -> Program | None:
        """Return the program that the times of measured slices promise most of, if it is another one."""
        measured = self._runs[-1]
        costs = self._auto.costs()
        parts = parts_of(measured, costs)
        tries = [self._best(costs, parts, number) for number in self._orders]
        best, predicted = min(tries, key=lambda pair: pair[1])
        known = self._simulated(measured.program, replace(costs, slice_factor=parts(measured.program.num_slices)))
        self._predicted = predicted * measured.seconds / known  # what a simulation leaves out is in both
        is_better = self._predicted < min(run.seconds for run in self._runs) * (1 - LEAST_GAIN)
        return best if is_better and best != measured.program else None

    def _best(
        self, costs: Costs, parts: Callable[[int], tuple[float, ...] | None], number: int
    ) -> tuple[Program, float]:
        """Return the order in so many slices with the shortest simulated step, and that step."""
        costs = replace(costs, slice_factor=parts(number))
        each = [(order, self._simulated(order, costs)) for order in self._orders[number]]
        return min(each, key=lambda pair: pair[1])

    def _fitting(self, program: Program, number: int) -> list[Program]:
        """Return the orders in so many slices that hold no more microbatches than the first program."""
        most = self._microbatches_held(self._auto.first)
        return [order for order in orders_in_slices(program, number) if self._microbatches_held(order) <= most]

    def _microbatches_held(self, program: Program) -> float:
        """Return the microbatches, of each stage, that the fullest rank holds."""
        return max(simulate(self._site.frozen.pruned_too(program)).peak_activations) / program.num_slices

    def _simulated(self, program: Program, costs: Costs) -> float:
        if program.num_slices == 1:
            costs = replace(costs, slice_factor=None)
        return simulate(self._site.frozen.pruned_too(program), costs).makespan

    def _conclude(self) -> None:
        """Stay with the quickest program, and say what slices gained."""
        quickest: Program | None = None
        if self._decides:
            first, *tries = self._runs
            best = min(tries, key=lambda run: run.seconds)
            outcome = SlicesOutcome(best.program, first.seconds, best.seconds, best.predicted, is_kept=False)
            outcome.is_kept = outcome.gained >= LEAST_GAIN
            quickest = best.program if outcome.is_kept else first.program
            self.outcome = outcome
            back = "" if outcome.is_kept else f"; back to {first.program.name}"
            self._say(
                f"{best.program.name}: a measured step takes {best.seconds * 1e3:.1f} ms instead of"
                f" {first.seconds * 1e3:.1f} ms ({-outcome.gained:+.1%}){back}"
            )
        quickest = answer_of_first(self._crew, quickest)
        assert quickest is not None, "the first rank names one"
        if quickest != self._now:
            self._take(quickest)
        self._end()

    def _take(self, program: Program) -> None:
        self._takes = True
        try:
            self._now = program
            self._site.choice.take(program)
        finally:
            self._takes = False

    def _end(self) -> None:
        """Leave the rest to adapting, which knows no slices."""
        self.is_over = True
        self._adapting.is_paused = self._auto.program.num_slices > 1

    def _say(self, text: str) -> None:
        if self._decides:
            print(f"schedule: {text}", file=sys.stderr, flush=True)


def parts_of(run: TimedProgram, costs: Costs) -> Callable[[int], tuple[float, ...]]:
    """Return what gives the part of a whole sequence's seconds that each of so many equal slices takes.

    What was measured counts for as many slices; a curve through these and the whole sequence for others.
    """
    stages, num_slices = run.program.num_stages, run.program.num_slices
    back = ("backward_input", "backward_weight") if is_split(run.program) else ("backward",)
    whole = sum(sum(costs.per_stage(name, stages)) for name in ("forward", *back))
    measured = costs_of(run.steps)
    total = sum(sum(measured.per_stage(name, stages)) for name in ("forward", "backward"))
    shares = measured.slice_factor
    assert isinstance(shares, list), "steps in slices say what each takes"
    seconds = [share * total for share in shares]
    each = _TOKENS // num_slices
    points = [(at * each, (at + 1) * each, taken) for at, taken in enumerate(seconds)]
    curve = fitted_curve([(0, _TOKENS, whole), *points])
    known: Mapping[int, list[float]] = {num_slices: seconds}

    def parts(number: int) -> tuple[float, ...]:
        step = _TOKENS // number
        guessed = [curve.at(at * step, (at + 1) * step) for at in range(number)]
        return tuple(taken / whole for taken in known.get(number, guessed))

    return parts
