"""The search for one number of slices: lengths and an order, from first ones to the best that moves lead to.

    lengths   equal; those whose longest slice takes least, of F+B and of F+I
    orders    every schedule in slices, and orders dispatched in simulated time
    then      tokens move between slices, and actions along rows, from the best few

The budget counts what was tried; the clock only cuts the search short, so a machine that keeps up finds the same every
time. Every phase looks at the clock.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

from drumline.core.placement import Placement
from drumline.core.prove.validate import validate
from drumline.core.timeline.idle import Limit
from drumline.core.units import number
from drumline.plan.search.search_run import SAME
from drumline.plan.slices.bound import slice_bound
from drumline.plan.slices.dispatch import DispatchRules, all_rules, dispatched
from drumline.plan.slices.lengths import between, equal_lengths, shortest_longest
from drumline.plan.slices.polish import annealed, length_moves
from drumline.plan.slices.results import SliceOrder, SliceResult
from drumline.plan.slices.unit_orders import SliceOrders
from drumline.plan.slices.work import B, F, I, SlicedWork, check_lengths

FAMILIES = {"linear": "1f1b", "loop": "interleaved-1f1b"}  # what a result is compared with, by placement
_POOL = 4
_PARTS = (0.75, 0.5, 0.25)  # of the way from equal lengths to those of equal time, tried under a limit
_STEPS = 4_000  # of local search in a turn
_HEATS = (0.002, 0.0, 0.01, 0.0005)
# What is surely done in a second of one core: actions dispatched, steps of local search, actions timed.
_DISPATCHED, _STEPPED, _TIMED = 25_000.0, 10_000.0, 2e6


class LengthsSearch:
    """A search for one number of slices; `run` it, and ask for its `result`."""

    def __init__(
        self,
        work: SlicedWork,
        placement: Placement,
        num_microbatches: int,
        num_slices: int,
        multiple: int,
        *,
        split: bool,
        limit: Limit | None,
        seconds: float | None,
        deadline: float,
        tries: float,
        seed: int,
        progress: Callable[[str], None] | None,
    ) -> None:
        self._work, self._split, self._slices, self._multiple = work, split, num_slices, multiple
        self._limit, self._rng, self._progress = limit or Limit(), random.Random(seed), progress
        self._deadline, self._tries = deadline, tries
        self._left = math.inf if seconds is None else seconds
        bounds = slice_bound(
            work, placement, num_microbatches=num_microbatches, num_slices=num_slices, multiple=multiple
        )
        self._bound = bounds.any if split else bounds.whole
        self._size = (3 if split else 2) * placement.num_stages * num_microbatches * num_slices
        self._family = FAMILIES.get(placement.name, "")
        self.num_tried, self.best = 0, None  # type: int, SliceOrder | None
        self._pool: list[SliceOrder] = []
        self._reference: SliceOrder | None = None
        self._equal: SliceOrder | None = None
        self._same: SliceOrder | None = None
        self._orders = SliceOrders(work, placement, num_microbatches, num_slices, split=split, limit=self._limit)

    @property
    def value(self) -> float:
        """The best makespan."""
        return math.inf if self.best is None else self.best.value

    def run(self) -> None:
        """Search until the bound, the budget or the clock ends it."""
        for lengths in self._first_lengths():
            for order in self._orders.hand_made(lengths):
                self._offer(order)
        for rules in all_rules(self._slices, whole=not self._split, bounded=bool(self._limit)):
            for lengths in self._first_lengths():
                if not self._keep_on(self._size / _DISPATCHED):
                    return
                self._try(lengths, rules)
        turn = 0
        while self._pool and self._keep_on(0.0):
            self._move_tokens(turn)
            self._anneal(turn)
            turn += 1

    def result(self, seconds: float, num_tried: int, interrupted: bool) -> SliceResult:
        """Return what was found, proven."""
        best = self.best
        assert best is not None, "a search without orders has no result"
        program = self._orders.program(best.lengths, best.rows, best.name)
        violations = validate(program)
        assert not violations, f"the search made a program that breaks a rule: {violations[0]}"
        timeline = self._work.simulate(program, check_lengths(best.lengths, self._work.tokens))
        return SliceResult(
            program,
            best.lengths,
            timeline,
            best.value,
            self._bound,
            best.name,
            self._reference,
            self._equal,
            self._same,
            self._split,
            seconds,
            num_tried,
            interrupted,
        )

    def _first_lengths(self) -> list[tuple[int, ...]]:
        """Return equal lengths, and those whose longest slice takes least, of the slowest stage."""
        tokens, count = self._work.tokens, self._slices
        equal = equal_lengths(tokens, count, self._multiple)
        stages = self._work.curves
        slowest = max(stages, key=lambda curves: curves[F].at(0, tokens) + curves[B].at(0, tokens))
        curves = [slowest[F] + slowest[B], *([slowest[F] + slowest[I]] if self._split else [])]
        even = [shortest_longest(curve, tokens, count, self._multiple)[0] for curve in curves]
        if self._limit:
            even += [between(equal, even[0], part, self._multiple) for part in _PARTS]
        return [lengths for lengths in dict.fromkeys([equal, *even]) if min(lengths) > 0]

    def _try(self, lengths: tuple[int, ...], rules: DispatchRules) -> SliceOrder | None:
        """Dispatch an order by rules, and offer it."""
        instance = self._orders.instance(lengths)
        order = self._orders.measured(lengths, dispatched(instance, self._slices, rules), "dispatched", rules)
        if order is None:
            self.num_tried += 1
        else:
            self._offer(order)
        return order

    def _offer(self, order: SliceOrder) -> None:
        self.num_tried += 1
        if order.lengths == equal_lengths(self._work.tokens, self._slices, self._multiple):
            if order.name == self._family and self._reference is None:
                self._reference = order
            self._equal = _better(order, self._equal)
        if order.name == self._family:
            self._same = _better(order, self._same)
        if self.best is None or order.value < self.best.value * (1 - SAME):
            self.best = order
            self._say()
        if all(abs(order.value - other.value) > SAME * order.value for other in self._pool):
            self._pool = sorted([*self._pool, order], key=lambda each: each.value)[:_POOL]

    def _say(self) -> None:
        if self._progress is not None:
            gap = 1 - self._bound / self.value if self.value > 0 else 0.0
            self._progress(
                f"{self._slices} slices: best {number(self.value)}, bound {number(self._bound)}, gap {gap:.2%},"
                f" {self.num_tried} tried"
            )

    def _keep_on(self, cost: float) -> bool:
        """Count seconds that are about to be spent; whether the bound, the budget and the clock allow it."""
        self._left -= cost
        return (
            self.value > self._bound * (1 + SAME)
            and self._left > 0
            and self.num_tried < self._tries
            and time.monotonic() < self._deadline
        )

    def _move_tokens(self, turn: int) -> None:
        """Move tokens between slices as long as it helps, in the same order or in one dispatched again."""
        start = self._pool[turn % len(self._pool)]
        improved = True
        while improved:
            improved = False
            for lengths in length_moves(start.lengths, self._multiple):
                if not self._keep_on(self._size / _TIMED + 1 / _STEPPED):
                    return
                order = self._orders.measured(lengths, start.rows, start.name, start.rules)
                if order is not None:
                    self._offer(order)
                if (order is None or order.value >= start.value * (1 - SAME)) and start.rules is not None:
                    if not self._keep_on(self._size / _DISPATCHED):
                        return
                    order = self._try(lengths, start.rules)
                if order is not None and order.value < start.value * (1 - SAME):
                    start, improved = order, True
                    break

    def _anneal(self, turn: int) -> None:
        """Move actions along the rows of one of the best."""
        start = self._pool[turn % len(self._pool)]
        cost = 1 / _STEPPED + self._size / (_TIMED * 50)

        def keep_on() -> bool:
            self.num_tried += 1
            return self._keep_on(cost)

        value, rows = annealed(
            self._orders.instance(start.lengths),
            start.rows,
            self._slices,
            self._rng,
            keep_on=keep_on,
            heat=_HEATS[turn % len(_HEATS)],
            num_steps=_STEPS,
            enough=self._bound * (1 + SAME),
        )
        if value < start.value * (1 - SAME) and self._orders.fits(start.lengths, rows):
            self._offer(SliceOrder(value, start.lengths, "searched", rows))


def _better(order: SliceOrder, other: SliceOrder | None) -> SliceOrder:
    return order if other is None or order.value < other.value else other
