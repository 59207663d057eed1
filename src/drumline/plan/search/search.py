"""The search: hand-made starts, constructions, W woven anew, local search, until the bound or the end of the budget.

    starts ──► climb over styles ──► weave W into the best orders ──► beams, annealing ──► proven program
                  (few microbatches first, where they are many)

Everything is drawn from one seed, and what it takes is counted in timed actions; the clock only cuts it short. So on a
machine that keeps up with its budget a search finds the same program every time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.idle import Limit
from drumline.core.memory import holdings
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.simulate import Simulation, simulate
from drumline.core.validate import validate
from drumline.plan.search.beam import Beam
from drumline.plan.search.construct import Built
from drumline.plan.search.instance import Instance, Rows
from drumline.plan.search.local import Annealer
from drumline.plan.search.lower_bounds import Bound, lower_bound
from drumline.plan.search.objective import Jitter, Objective
from drumline.plan.search.starts import Start, split, starts
from drumline.plan.search.stretch import stretched
from drumline.plan.search.styles import FIRST, WOVEN, Style, Styles, climb

_SAME = 1e-9  # relative: values this close are one


@dataclass(frozen=True, slots=True)
class Found:
    """What a search returns: a proven program, its timeline, its value under the objective, and what bounds it."""

    program: Program
    timeline: Simulation
    objective: str
    value: float
    bound: Bound
    starts: tuple[Start, ...]
    seconds: float
    num_tried: int
    jitter: Jitter | None = None
    is_interrupted: bool = False

    @property
    def gap(self) -> float:
        """How much of the value is above the bound: 0 is proven to be the best."""
        return max(0.0, 1.0 - self.bound.value / self.value) if self.value > 0 else 0.0

    @property
    def verdict(self) -> str:
        """How far from the possible it is, in words."""
        if self.gap <= _SAME:
            return f"proven to be the best: the {self.bound.name} bound is the same"
        return f"at most {self.gap:.2%} from the best: none is below {self.bound.value:g} (the {self.bound.name} bound)"

    @property
    def placement(self) -> str:
        """The name of the placement that was searched on."""
        return self.program.placement.name


def search(
    costs: Costs,
    placement: Placement,
    *,
    num_microbatches: int,
    limit: Limit | None = None,
    objective: str = "makespan",
    jitter: Jitter | None = None,
    seconds: float = 10.0,
    tries: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> Found:
    """Return the best program found for these costs on this placement within the limit.

    `seconds` is the budget; it ends earlier where the bound is reached, or so many programs were tried. Ctrl-C ends it
    with the best so far.

    >>> found = search(Costs(), Placement.linear(4), num_microbatches=8, limit=Limit(max_activations=4))
    >>> found.value, found.bound.value, found.gap
    (27.0, 27.0, 0.0)
    """
    instance = Instance(costs, placement, num_microbatches, limit or Limit())
    _check_limit(instance)
    run = _Search(instance, Objective(instance, objective, jitter), seconds, seed, progress)
    run.tries = math.inf if tries is None else tries
    return run.found()


def _check_limit(instance: Instance) -> None:
    """Refuse a limit that not even one microbatch after another fits, and name the smallest that would do."""
    programs = (instance.plain, instance.joined)
    if any(not validate(one, limit=instance.limit, costs=instance.costs) for one in programs):
        return
    limit, holding = instance.limit, [holdings(one, instance.costs) for one in programs]
    pairs = min(max(rank.peak_pairs for rank in ranks) for ranks in holding)
    size = min(max(rank.peak_bytes or 0.0 for rank in ranks) for ranks in holding)
    if limit.max_activations is not None and pairs > limit.max_activations:
        given, least = f"{limit.max_activations:g} pairs", f"max_activations={pairs}"
    else:
        given, least = f"{limit.max_bytes:,.0f} bytes", f"max_bytes={math.ceil(size)}"
    error = PlanError(
        f"no program keeps every rank within {given}: one microbatch alone holds more",
        expected=f"{least} or more",
        fix="use more ranks or smaller microbatches",
    )
    error.smallest_bytes = math.ceil(size) if instance.costs.knows_bytes else None
    raise error


class _Search:
    """One search under way: the best so far, a pool to improve on, and what is left of the budget."""

    def __init__(
        self,
        instance: Instance,
        objective: Objective,
        seconds: float,
        seed: int,
        progress: Callable[[str], None] | None,
    ) -> None:
        self.instance, self.objective, self.rng = instance, objective, random.Random(seed)
        self.began = time.monotonic()
        self.deadline = self.began + seconds
        self.size = 3 * len(instance.rank)
        self.units = seconds * _UNITS_PER_SECOND
        self.tries = math.inf
        self.progress = progress
        whole = any(
            instance.seconds[n + 3] < instance.seconds[n + 1] + instance.seconds[n + 2] - 1e-12
            for n in range(0, instance.num_actions, 4)
        )
        self.may_join = whole or not instance.rows_fit(instance.plain)
        self.bound = lower_bound(instance, objective.name) if objective.jitter is None else Bound(0.0, "none")
        self.starts = starts(instance, objective)
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
        """Take rows into the pool if they are among the best, and as the best if they are."""
        self.num_tried += 1
        if value < self.value * (1 - _SAME):
            self.value, self.rows, self.program = value, rows, None
            self.say()
        is_new = all(abs(value - other) > _SAME * value for other, _ in self.pool)
        if is_new and (len(self.pool) < _POOL or value < self.pool[-1][0]):
            self.pool = sorted([*self.pool, (value, rows)], key=lambda one: one[0])[:_POOL]

    def say(self) -> None:
        """Report the best and the bound."""
        if self.progress is not None:
            gap = 1 - self.bound.value / self.value if self.value > 0 else 0.0
            self.progress(f"best {self.value:g}, bound {self.bound.value:g}, gap {gap:.2%}, {self.num_tried} tried")

    def keep_on(self, units: float = 0.0) -> bool:
        """Whether there is anything left to gain and to spend."""
        self.units -= units
        at_bound = self.value <= self.bound.value * (1 + _SAME)
        to_spend = self.units > 0 and self.num_tried < self.tries and time.monotonic() < self.deadline
        return to_spend and not at_bound

    def run(self) -> None:
        """Search until there is nothing left to gain or to spend."""
        if self.value > self.bound.value * (1 + _CLOSE):
            self.construct()
        self.stretch()
        self.improve()

    def found(self) -> Found:
        """Run everything, and return the best with its proof."""
        interrupted = False
        try:
            self.say()
            self.run()
        except KeyboardInterrupt:
            interrupted = True
        program = self.program or self.instance.program(self.rows or [])
        violations = validate(program, limit=self.instance.limit, costs=self.instance.costs)
        assert not violations, f"the search made a program that breaks a rule: {violations[0]}"
        timeline = simulate(program, self.instance.costs, limit=self.instance.limit or None)
        return Found(
            program,
            timeline,
            self.objective.name,
            self.value,
            self.bound,
            tuple(self.starts),
            time.monotonic() - self.began,
            self.num_tried,
            self.objective.jitter,
            interrupted,
        )

    def smaller(self, few: int) -> Instance | None:
        """Return the same with fewer microbatches, where there are more of them and all alike."""
        instance = self.instance
        alike = len(set(instance.costs.factors(instance.num_microbatches))) == 1
        if instance.num_microbatches <= few or not alike or instance.placement.mirrored:
            return None
        costs = instance.costs
        if not isinstance(costs.microbatch_factor, float | int):
            costs = replace(costs, microbatch_factor=costs.factors(instance.num_microbatches)[0])
        return replace(instance, costs=costs, num_microbatches=few)

    def stretch(self) -> None:
        """Search with fewer microbatches, and repeat the middle of what was found."""
        small = self.smaller(2 * self.instance.num_ranks + 2)
        if small is None or not self.keep_on() or self.objective.jitter is not None:
            return
        seconds = min(self.deadline - time.monotonic(), self.units / _UNITS_PER_SECOND) * _STRETCHING
        fewer = _Search(small, Objective(small, self.objective.name), seconds, 0, None)
        fewer.run()
        self.units -= seconds * _UNITS_PER_SECOND - max(fewer.units, 0.0)
        for _, rows in fewer.pool:
            for longer in stretched(small, rows, self.instance):
                if all(self.instance.fits(row, rank) for rank, row in enumerate(longer)):
                    measured = self.objective.measure(longer)
                    if measured is not None:
                        self.offer(measured.value, longer)
                if not self.keep_on(self.size):
                    return

    def construct(self) -> None:
        """Climb over styles: with fewer microbatches first, where there are many of them and all alike."""
        instance, given = self.instance, None
        share = self.units * _CONSTRUCTING
        small = self.smaller(3 * instance.num_ranks)
        if small is not None:
            given = self._climb(small, Objective(small, self.objective.name), share * 2 / 3, None)
            share /= 3
        self._climb(instance, self.objective, share, given)

    def _climb(
        self,
        instance: Instance,
        objective: Objective,
        units: float,
        given: Sequence[Style] | None,
        *,
        order: Rows | None = None,
    ) -> list[Style]:
        """Try styles for so many units, and return the best of them."""
        styles = Styles(instance, may_join=self.may_join and order is None)
        best: list[tuple[float, Style]] = []
        own = instance is self.instance

        def value(built: Built) -> float:
            exact = objective.jitter is None and objective.name != "steady" and not instance.costs.has_finite_links
            if exact:
                return objective.of_ends(built.rows, built.ends)
            measured = objective.measure(built.rows)
            return math.inf if measured is None else measured.value

        cost = _BUILD * 3 * len(instance.rank)
        tries = int(min(units / cost, _MOST_BUILDS))
        drawn = {} if given is None else {"num_drawn": 0}
        made = climb(styles, value, self.rng, given=given or FIRST, order=order, **drawn)
        for found, style, built in islice(made, tries):
            best.append((found, style))
            if own:
                self.offer(found, built.rows)
            if not self.keep_on(cost):
                break
        return [style for _, style in sorted(best, key=lambda one: one[0])[:6]]

    def improve(self) -> None:
        """Improve what is in the pool, and what beams find, in turns, for as long as the budget lasts."""
        turn = 0
        while self.keep_on() and self.pool:
            if turn % 3 < 2:
                self.weave(turn // 3)
                self.anneal(self.pool[turn % len(self.pool)][1], turn)
            elif (rows := self.beam(turn // 3)) is not None:
                self.anneal(rows, turn)
            turn += 1

    def anneal(self, rows: Rows, turn: int) -> None:
        """Walk along the critical paths from these rows on."""
        steps = max(_LEAST_STEPS, min(_MOST_STEPS, int(self.units / (8 * self.size))))
        value, improved = self.annealer.run(
            rows,
            num_steps=steps,
            heat=_HEATS[turn % len(_HEATS)] if self.size <= _BEAM_SIZE else 0.0,
            keep_on=lambda best: self._note(best) and self.keep_on(self.size + 30),
        )
        self.offer(value, improved)

    def weave(self, turn: int) -> None:
        """Place the W of a good order anew: where they fill gaps, or where memory asks for them."""
        rows = self.pool[turn % min(len(self.pool), 3)][1]
        self._climb(self.instance, self.objective, _WEAVES * _BUILD * self.size, WOVEN, order=split(rows))

    def beam(self, turn: int) -> Rows | None:
        """Return what a beam finds, another one every turn; None where the instance is too large for it."""
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

    def _note(self, best: float) -> bool:
        """Whether the bound is still below what local search has."""
        self.num_tried += 1
        return best > self.bound.value * (1 + _SAME)


# What timing one action is worth; a machine does two or three million of them in a second.
_UNITS_PER_SECOND = 1.5e6
_BUILD = 15.0  # building takes so many times as long as timing
_CONSTRUCTING = 0.4  # share of the budget for constructions
_MOST_BUILDS = 300
_CLOSE = 0.01  # a start this close to the bound is improved rather than replaced
_STRETCHING = 0.6  # share of what is left for a search with fewer microbatches
_POOL = 8
_LEAST_STEPS, _MOST_STEPS = 500, 4000
_HEATS = (0.01, 0.03, 0.003)
_BEAM_SIZE = 700
_WEAVES = 24
_BEAMS = ((30, 0.0), (100, 0.02), (100, 0.1), (200, 0.0), (60, 0.05))
_BRANCH = 40.0  # what growing one state of a beam is worth
