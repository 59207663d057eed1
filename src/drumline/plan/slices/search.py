"""Find lengths of slices and an order of their units, with a bound for all lengths and all orders.

    lengths   equal; those whose longest slice takes least, of F+B and of F+I
    orders    every schedule in slices, and orders dispatched in simulated time
    then      tokens move between slices, and actions along rows, from the best few

One seed drives all randomness. The budget counts what was tried; the clock only cuts the search short, so a machine
that keeps up finds the same every time. Every phase looks at the clock.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drumline.core.costs import Costs
from drumline.core.errors import PlanError, ScheduleError
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import Simulation
from drumline.core.timeline.idle import Limit
from drumline.core.units import number
from drumline.plan.search.bounds.instance import Rows
from drumline.plan.search.search_run import SAME, SECONDS
from drumline.plan.slices.bound import slice_bound
from drumline.plan.slices.dispatch import DispatchRules, all_rules, dispatched
from drumline.plan.slices.lengths import between, equal_lengths, shortest_longest
from drumline.plan.slices.polish import annealed, length_moves
from drumline.plan.slices.units import UnitInstance, UnitTimes, peaks_fit
from drumline.plan.slices.work import B, F, I, SlicedWork, check_lengths
from drumline.schedules import schedules
from drumline.schedules.slices import sliced

FAMILIES = {"linear": "1f1b", "loop": "interleaved-1f1b"}  # what a result is compared with, by placement
_POOL = 4
_PARTS = (0.75, 0.5, 0.25)  # of the way from equal lengths to those of equal time, tried under a limit
_STEPS = 4_000  # of local search in a turn
_HEATS = (0.002, 0.0, 0.01, 0.0005)
# What is surely done in a second of one core: actions dispatched, steps of local search, actions timed.
_DISPATCHED, _STEPPED, _TIMED = 25_000.0, 10_000.0, 2e6
_LATE = 0.1  # of the budget stays for the proof and the timeline


@dataclass(frozen=True, slots=True)
class SliceOrder:
    """Lengths and rows in one order, their makespan, and how the order was made."""

    value: float
    lengths: tuple[int, ...]
    name: str
    rows: Rows
    rules: DispatchRules | None = None


@dataclass(frozen=True, slots=True)
class SliceResult:
    """A proven program over units, the lengths of its slices, its timeline, and the bound for all of them.

    `reference` is 1f1b, interleaved where ranks hold several stages, in as many equal slices; `equal` the best order of
    equal slices, and `same` the best lengths in the reference's order. They are None where none fits the limit.
    """

    program: Program
    lengths: tuple[int, ...]
    timeline: Simulation
    value: float
    bound: float
    name: str
    reference: SliceOrder | None
    equal: SliceOrder | None
    same: SliceOrder | None
    split: bool
    seconds: float
    num_tried: int
    is_interrupted: bool = False

    @property
    def num_slices(self) -> int:
        """The number of slices."""
        return len(self.lengths)

    @property
    def gain(self) -> float | None:
        """The share of the reference's step that is saved."""
        return None if self.reference is None else 1.0 - self.value / self.reference.value

    @property
    def gap(self) -> float:
        """The share of the value above the bound; 0 means that no lengths and no order are better."""
        return max(0.0, 1.0 - self.bound / self.value) if self.value > 0 else 0.0

    @property
    def verdict(self) -> str:
        """How far from the optimum it is, in words."""
        of = "any lengths and order" if self.split else "any lengths and order with whole backwards"
        if self.gap <= SAME:
            return f"proven optimal: it equals the bound of {of}"
        return f"at most {self.gap:.2%} from optimal: {of} need {number(self.bound)} or more"


def search_slices(
    costs: Costs,
    placement: Placement,
    *,
    num_microbatches: int,
    slices: int | Sequence[int],
    tokens: int = 4096,
    attention: float | Sequence[float] | None = None,
    overhead: float = 0.0,
    multiple: int = 1,
    split: bool = True,
    limit: Limit | None = None,
    seconds: float | None = None,
    tries: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> SliceResult:
    """Return the best lengths and order found for so many slices of sequences of `tokens`, and their bound.

    `costs` are those of whole sequences. `attention` is the part of their time that grows with keys: one number, or one
    for each stage (default: that of the costs). A slice takes as long as `overhead` tokens more. Lengths are multiples
    of `multiple` tokens. Without `split`, backwards stay whole. With several numbers of `slices`, the best counts.
    `limit` counts whole microbatches, or bytes. The search ends after `seconds` (10 unless given) or `tries` programs,
    or when it reaches the bound.

    >>> found = search_slices(
    ...     Costs(), Placement.linear(4), num_microbatches=2, slices=4, attention=0.4, multiple=64, split=False
    ... )
    >>> found.lengths, round(found.value, 3), round(found.bound, 3), round(found.reference.value, 3)
    ((1408, 1024, 896, 768), 8.289, 8.289, 9.825)
    """
    began = time.monotonic()
    numbers = [slices] if isinstance(slices, int) else list(dict.fromkeys(slices))
    if not numbers or min(numbers) < 1:
        raise PlanError(f"slices is {slices!r}", expected="1 or more, or several such numbers")
    if seconds is not None and seconds <= 0:
        raise PlanError(f"seconds is {seconds:g}", expected="more than 0")
    if placement.mirrored:
        raise PlanError(
            "slices need one copy of every stage",
            expected="a placement that is not bidirectional: all slices of a microbatch take one way",
            fix="use linear, loop or v",
        )
    work = SlicedWork.of(costs, placement.num_stages, tokens=tokens, attention=attention, overhead=overhead)
    budget = SECONDS if seconds is None and tries is None else seconds
    runs: list[_LengthsSearch] = []
    interrupted = False
    try:
        for place, num_slices in enumerate(numbers):
            left = math.inf if budget is None else (began + budget - time.monotonic()) / (len(numbers) - place)
            share = None if tries is None else tries // len(numbers)
            run = _LengthsSearch(
                work,
                placement,
                num_microbatches,
                num_slices,
                multiple,
                split=split,
                limit=limit,
                seconds=None if budget is None else budget / len(numbers),
                deadline=math.inf if budget is None else time.monotonic() + max(left, 0.0) * (1 - _LATE),
                tries=math.inf if share is None else share,
                seed=seed,
                progress=progress,
            )
            runs.append(run)
            run.run()
    except KeyboardInterrupt:
        interrupted = True
    finished = [run for run in runs if run.best is not None]
    if not finished:
        raise PlanError(
            "no order of slices keeps every rank within the limit",
            expected="a limit in which one microbatch fits, in slices",
            fix="use a larger limit, or more ranks",
        )
    best = min(finished, key=lambda run: run.value)
    return best.result(time.monotonic() - began, sum(run.num_tried for run in runs), interrupted)


class _LengthsSearch:
    """A search for one number of slices."""

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
        self._work, self._placement, self._split = work, placement, split
        self._microbatches, self._slices, self._multiple = num_microbatches, num_slices, multiple
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
        self._instances: dict[tuple[int, ...], UnitInstance] = {}

    @property
    def value(self) -> float:
        """The best makespan."""
        return math.inf if self.best is None else self.best.value

    def run(self) -> None:
        """Search until the bound, the budget or the clock ends it."""
        for lengths in self._first_lengths():
            for order in self._hand_made(lengths):
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
        program = self._program(best.lengths, best.rows, best.name)
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

    def _program(self, lengths: tuple[int, ...], rows: Rows, name: str) -> Program:
        units = self._instance(lengths).program(rows)
        name = f"{name} in {self._slices} slices"
        return Program.of_columns(replace(units.columns, num_slices=self._slices), name)

    def _fits(self, lengths: tuple[int, ...], rows: Rows) -> bool:
        """Whether all rows stay within the limit, gradients of keys and values included."""
        most = self._limit.max_bytes
        if not peaks_fit(self._instance(lengths), rows):
            return False
        if most is None or self._work.costs.key_value_bytes == 0.0 or self._slices == 1:
            return True
        timeline = self._work.simulate(self._program(lengths, rows, ""), lengths)
        return max(timeline.peak_bytes or (0.0,)) <= self._limit.most_bytes

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

    def _instance(self, lengths: tuple[int, ...]) -> UnitInstance:
        """Return the instance of units of these lengths."""
        if lengths not in self._instances:
            if len(self._instances) > 64:
                self._instances.clear()
            costs, limit = self._work.costs_of(lengths, self._microbatches), self._limit
            if limit.max_activations is not None:  # of whole microbatches, in the tokens that are held
                ones: Any = {"activation_bytes": 1.0, "weight_bytes": 0.0, "gradient_bytes": 0.0}
                nothing: Any = {"held_until_weight_bytes": None, "optimizer_bytes": 0.0, "recompute": False}
                per_rank = self._placement.num_stages / self._placement.num_ranks
                most = limit.max_activations * per_rank
                if limit.max_bytes is None:
                    costs, limit = replace(costs, **ones, **nothing), Limit(max_bytes=most)
                else:
                    raise PlanError("a limit in microbatches and in bytes", expected="one of them, with slices")
            table = np.tile(self._work.table(lengths), (1, self._microbatches, 1))
            self._instances[lengths] = UnitInstance(
                costs, self._placement, self._microbatches * self._slices, limit, np.ascontiguousarray(table)
            )
        return self._instances[lengths]

    def _hand_made(self, lengths: tuple[int, ...]) -> Iterator[SliceOrder]:
        """Yield every schedule of the placement in slices, as far as it fits the limit."""
        placement, units = self._placement, self._microbatches * self._slices
        counts = placement.num_ranks, units, placement.num_stages // placement.num_ranks
        for name, schedule in schedules().items():
            if not schedule.trains or not schedule.flushed or schedule.two_directions:
                continue
            if schedule.splits_backward and not self._split:
                continue
            try:
                if schedule.refusal(*counts) is not None or schedule.layout(counts[0], counts[2]) != placement:
                    continue
                program = sliced(schedule.build(*counts), self._slices)
            except ScheduleError:
                continue
            order = self._measured(lengths, self._instance(lengths).rows_of(program), name)
            if order is not None:
                yield order

    def _measured(
        self, lengths: tuple[int, ...], rows: Rows | None, name: str, rules: DispatchRules | None = None
    ) -> SliceOrder | None:
        """Return rows with their makespan; None if they do not fit, or cannot run."""
        if not rows:
            return None
        times = UnitTimes(self._instance(lengths))
        times.load(rows)
        value = times.makespan()
        if value == math.inf or not self._fits(lengths, rows):
            return None
        return SliceOrder(value, lengths, name, rows, rules)

    def _try(self, lengths: tuple[int, ...], rules: DispatchRules) -> SliceOrder | None:
        """Dispatch an order by rules, and offer it."""
        instance = self._instance(lengths)
        order = self._measured(lengths, dispatched(instance, self._slices, rules), "dispatched", rules)
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
                order = self._measured(lengths, start.rows, start.name, start.rules)
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
            self._instance(start.lengths),
            start.rows,
            self._slices,
            self._rng,
            keep_on=keep_on,
            heat=_HEATS[turn % len(_HEATS)],
            num_steps=_STEPS,
            enough=self._bound * (1 + SAME),
        )
        if value < start.value * (1 - SAME) and self._fits(start.lengths, rows):
            self._offer(SliceOrder(value, start.lengths, "searched", rows))


def _better(order: SliceOrder, other: SliceOrder | None) -> SliceOrder:
    return order if other is None or order.value < other.value else other
