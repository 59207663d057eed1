"""A running search: hand-made starts, constructions, moving W, local search, until the bound or the budget ends it.

    starts ──► climb over styles ──► stretch ──► weave W, anneal, beams in turn ──► the best
                 (far from the bound)  (many equal microbatches)

One seed drives all randomness, and the budget counts timed actions; the clock only cuts the search short. So on a
machine that keeps up with its budget, a search finds the same program every time. Every phase looks at the clock, the
bound and the starts too, which take seconds for programs of many actions.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from drumline.core.kernel.library import kernel
from drumline.core.program import Program
from drumline.core.units import number
from drumline.plan.search.beam import Beam
from drumline.plan.search.bounds.instance import B, I, Instance, Rows, W
from drumline.plan.search.bounds.lower_bounds import Bound, lower_bound
from drumline.plan.search.construct import TimedRows
from drumline.plan.search.local import Annealer
from drumline.plan.search.objective import Objective
from drumline.plan.search.starts import split, starts, stretched
from drumline.plan.search.styles import FIRST, WOVEN, Style, Styles, climb

SAME = 1e-9  # relative: values this close are equal

# A unit is what timing one action of a move costs: machines time twice as many per second, in the kernel or in Python.
_UNITS_PER_SECOND, _UNITS_PER_SECOND_IN_PYTHON = 1e8, 1e6
_PROOF = 5e-6  # seconds per action for the proof and the timeline at the end
SECONDS = 10.0  # unless given, or a number of programs is
_BUILD = 60.0  # the cost of building, per action
_MEASURE = 30.0  # and of timing a program that was not moved
_STEP = 50  # what a step of local search costs beside the timing
_BRANCH = 8000.0  # the cost of growing one state of a beam
_SIMULATED, _SAMPLED = 500.0, 80.0  # times as much for the simulator, and for each sample of a jitter
_CONSTRUCTING = 0.4  # share of the budget for constructions
_MOST_BUILDS = 300
_CLOSE = 0.01  # a start this close to the bound is improved rather than replaced
_STRETCHING = 0.6  # share of the remaining budget for a search with fewer microbatches
_POOL = 8
_LEAST_STEPS, _MOST_STEPS = 500, 40_000
_HEATS = (0.01, 0.03, 0.003)
_SMALL = 300  # actions; of more, each is a smaller share of the makespan
_BEAM_SIZE = 700
_WEAVES = 24
_BEAMS = ((30, 0.0), (100, 0.02), (100, 0.1), (200, 0.0), (60, 0.05))


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may spend: timed actions, time until the moment `deadline`, and programs to try."""

    units: float
    deadline: float
    tries: float

    @classmethod
    def of(cls, size: int, began: float, seconds: float | None, tries: float = math.inf) -> Budget:
        """Return the budget for programs of `size` actions; with `tries` and without `seconds`, no clock counts.

        >>> Budget.of(100, 0.0, 2.0).deadline
        1.9995
        >>> Budget.of(100, 0.0, None, tries=20)
        Budget(units=1000122000.0, deadline=inf, tries=20)
        """
        if seconds is None and tries < math.inf:
            return cls(SECONDS * _UNITS_PER_SECOND + tries * (_BUILD + 1) * size, math.inf, tries)
        seconds = SECONDS if seconds is None else seconds
        return cls(seconds * units_per_second(), began + seconds - min(seconds / 2, size * _PROOF), tries)


def units_per_second() -> float:
    """Return how many units this installation surely spends in a second."""
    return _UNITS_PER_SECOND_IN_PYTHON if kernel() is None else _UNITS_PER_SECOND


class SearchRun:
    """A running search: the best so far, a pool to improve, and the remaining budget."""

    def __init__(
        self,
        instance: Instance,
        objective: Objective,
        budget: Budget,
        seed: int = 0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self.instance, self.objective, self.rng = instance, objective, random.Random(seed)
        self.size = 3 * len(instance.rank)
        self.units, self.deadline, self.tries = budget.units, budget.deadline, budget.tries
        self.timing = 1.0  # the cost of timing one action
        if objective.packed is None:  # in Python
            jitter = objective.jitter
            self.timing = _SIMULATED if jitter is None else _SAMPLED * jitter.num_samples
            self.units *= self.timing if self.deadline == math.inf else 1.0  # then programs are counted, not time
        self.progress = progress
        times = instance.times
        whole = bool((times[..., B] < times[..., I] + times[..., W] - 1e-12).any())
        self.may_join = whole or not instance.rows_fit(instance.plain)
        bound = partial(lower_bound, instance, objective.name, is_late=self.is_late)
        self.bound = bound() if objective.jitter is None else Bound(0.0, "none")
        self.starts = starts(instance, objective, is_late=self.is_late)
        first = self.starts[0]
        self.value, self.rows = first.value, first.rows
        self.program: Program | None = first.program
        self.annealer = Annealer(objective, self.rng, may_join=self.may_join)
        self.pool: list[tuple[float, Rows]] = []
        self.num_tried = len(self.starts)
        for start in self.starts:
            if start.rows is not None:
                self.offer(start.value, start.rows)

    def offer(self, value: float, rows: Rows) -> None:
        """Add rows to the pool if they are among the best, and record them if they are the best."""
        self.num_tried += 1
        if value < self.value * (1 - SAME):
            self.value, self.rows, self.program = value, rows, None
            self.say()
        is_new = all(abs(value - other) > SAME * value for other, _ in self.pool)
        if is_new and (len(self.pool) < _POOL or value < self.pool[-1][0]):
            self.pool = sorted([*self.pool, (value, rows)], key=lambda pair: pair[0])[:_POOL]

    def say(self) -> None:
        """Report the best and the bound."""
        if self.progress is not None:
            gap = 1 - self.bound.value / self.value if self.value > 0 else 0.0
            self.progress(
                f"best {number(self.value)}, bound {number(self.bound.value)}, gap {gap:.2%}, {self.num_tried} tried"
            )

    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def keep_on(self, units: float = 0.0) -> bool:
        """Whether there is anything left to gain and to spend."""
        self.units -= units
        at_bound = self.value <= self.bound.value * (1 + SAME)
        to_spend = self.units > 0 and self.num_tried < self.tries and not self.is_late()
        return to_spend and not at_bound

    def run(self) -> None:
        """Search until there is nothing left to gain or to spend."""
        if self.value > self.bound.value * (1 + _CLOSE):
            self.construct()
        self.stretch()
        self.improve()

    def smaller(self, few: int) -> Instance | None:
        """Return the same instance with fewer microbatches, if there are many and all are alike."""
        instance = self.instance
        alike = len(set(instance.costs.factors(instance.num_microbatches))) == 1
        if instance.num_microbatches <= few or not alike or instance.placement.mirrored:
            return None
        costs = instance.costs
        if not isinstance(costs.microbatch_factor, float | int):
            costs = replace(costs, microbatch_factor=costs.factors(instance.num_microbatches)[0])
        return replace(instance, costs=costs, num_microbatches=few)

    def stretch(self) -> None:
        """Search with fewer microbatches, and repeat the middle of the result."""
        small = self.smaller(2 * self.instance.num_ranks + 2)
        if small is None or not self.keep_on() or self.objective.jitter is not None:
            return
        now = time.monotonic()
        seconds = (self.deadline - now) * _STRETCHING
        units = min(self.units * _STRETCHING, seconds * units_per_second())
        share = Budget(units, now + seconds, (self.tries - self.num_tried) * _STRETCHING)
        fewer = SearchRun(small, Objective(small, self.objective.name), share)
        fewer.run()
        self.units -= units - max(fewer.units, 0.0)
        self.num_tried += fewer.num_tried
        for _, rows in fewer.pool:
            for longer in stretched(small, rows, self.instance, is_late=self.is_late):
                if all(self.instance.fits(row, rank) for rank, row in enumerate(longer)):
                    measured = self.objective.measure(longer)
                    if measured is not None:
                        self.offer(measured.value, longer)
                if not self.keep_on((_MEASURE + self.timing) * self.size):
                    return

    def construct(self) -> None:
        """Climb over styles: first with fewer microbatches, if there are many and all are alike."""
        instance, styles = self.instance, None
        share = self.units * _CONSTRUCTING
        small = self.smaller(3 * instance.num_ranks)
        if small is not None:
            styles = self._climb(small, Objective(small, self.objective.name), share * 2 / 3, None)
            share /= 3
        self._climb(instance, self.objective, share, styles)

    def _climb(
        self,
        instance: Instance,
        objective: Objective,
        units: float,
        given_styles: Sequence[Style] | None,
        *,
        order: Rows | None = None,
    ) -> list[Style]:
        """Try styles for this many units, and return the best of them."""
        styles = Styles(instance, may_join=self.may_join and order is None)
        best: list[tuple[float, Style]] = []
        is_own = instance is self.instance

        def value(built: TimedRows) -> float:
            exact = objective.jitter is None and objective.name != "steady" and not instance.costs.has_finite_links
            if exact:
                return objective.of_ends(built.rows, built.ends)
            measured = objective.measure(built.rows)
            return math.inf if measured is None else measured.value

        cost = (_BUILD + self.timing) * 3 * len(instance.rank)
        tries = int(min(units / cost, _MOST_BUILDS))
        drawn = {} if given_styles is None else {"num_drawn": 0}
        climbs = climb(
            styles, value, self.rng, starts=given_styles or FIRST, order=order, is_late=self.is_late, **drawn
        )
        for value_found, style, built in islice(climbs, tries):
            best.append((value_found, style))
            if is_own:
                self.offer(value_found, built.rows)
            if not self.keep_on(cost):
                break
        return [style for _, style in sorted(best, key=lambda pair: pair[0])[:6]]

    def improve(self) -> None:
        """Alternate between improving the pool and running beams, as long as the budget lasts."""
        turn = 0
        while self.keep_on() and self.pool:
            if turn % 3 < 2:
                self.weave(turn // 3)
                self.anneal(self.pool[turn % len(self.pool)][1], turn)
            elif (rows := self.beam(turn // 3)) is not None:
                self.anneal(rows, turn)
            turn += 1

    def anneal(self, rows: Rows, turn: int) -> None:
        """Anneal along the critical paths from these rows."""
        # It cools down within what is left.
        left = min(self.units / (4 * self.timing * self.size), self.tries - self.num_tried)
        steps = max(_LEAST_STEPS, min(_MOST_STEPS, int(left)))
        value, improved = self.annealer.run(
            rows,
            num_steps=steps,
            heat=_HEATS[turn % len(_HEATS)] * min(1.0, _SMALL / self.size),
            enough=self.bound.value * (1 + SAME),
            steps_to_do=self._steps,
        )
        self.offer(value, improved)

    def weave(self, turn: int) -> None:
        """Place the W of a good order again: where they fill gaps, or where memory requires them."""
        rows = self.pool[turn % min(len(self.pool), 3)][1]
        self._climb(
            self.instance, self.objective, _WEAVES * (_BUILD + self.timing) * self.size, WOVEN, order=split(rows)
        )

    def beam(self, turn: int) -> Rows | None:
        """Return what a beam finds, a different one every turn; None if the instance is too large for it."""
        if self.size > _BEAM_SIZE:
            return None
        width, noise = _BEAMS[turn % len(_BEAMS)]
        rows = Beam(self.instance, self.rng).run(
            width=width, noise=noise, keep_on=lambda states: self.keep_on(states * _BRANCH)
        )
        measured = None if rows is None else self.objective.measure(rows)
        if rows is None or measured is None:
            return None
        self.offer(measured.value, rows)
        return rows

    def _steps(self, best: float, rows: Rows | None, done: int) -> int:
        """Count the steps that local search has done, record better rows, and say how many steps may follow."""
        self.num_tried += done
        if rows is not None and best < self.value * (1 - SAME):
            self.offer(best, rows)
        each = self.timing * self.size + _STEP
        if not self.keep_on(done * each):
            return 0
        return math.ceil(min(self.units / each, self.tries - self.num_tried))
