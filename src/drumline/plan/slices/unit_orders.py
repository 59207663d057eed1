"""Orders of a number of slices: those of schedules, what an order takes with some lengths, and whether it fits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from drumline.core.errors import PlanError, ScheduleError
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import Rows
from drumline.plan.slices.dispatch import DispatchRules
from drumline.plan.slices.results import SliceOrder
from drumline.plan.slices.units import UnitInstance, UnitTimes, peaks_fit
from drumline.plan.slices.work import SlicedWork
from drumline.schedules import schedules
from drumline.schedules.slices import sliced

_REMEMBERED = 64  # instances: local search returns to lengths that it has left


class SliceOrders:
    """Orders of the units of some microbatches, each in so many slices, on the ranks of a placement.

    >>> from drumline.core.costs import Costs
    >>> work = SlicedWork.of(Costs(), 2, tokens=8, attention=0.0, overhead=0.0)
    >>> orders = SliceOrders(work, Placement.linear(2), 1, 2, split=False, limit=Limit())
    >>> {order.name: order.value for order in orders.hand_made((4, 4))}["1f1b"]
    4.5
    """

    def __init__(
        self, work: SlicedWork, placement: Placement, num_microbatches: int, num_slices: int, *, split: bool,
        limit: Limit,
    ) -> None:  # fmt: skip
        self._work, self._placement, self._split, self._limit = work, placement, split, limit
        self._microbatches, self._slices = num_microbatches, num_slices
        self._instances: dict[tuple[int, ...], UnitInstance] = {}

    def instance(self, lengths: tuple[int, ...]) -> UnitInstance:
        """Return the instance of units of these lengths."""
        if lengths not in self._instances:
            if len(self._instances) > _REMEMBERED:
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

    def program(self, lengths: tuple[int, ...], rows: Rows, name: str) -> Program:
        """Return rows as a program in slices."""
        units = self.instance(lengths).program(rows)
        name = f"{name} in {self._slices} slices"
        return Program.of_columns(replace(units.columns, num_slices=self._slices), name)

    def fits(self, lengths: tuple[int, ...], rows: Rows) -> bool:
        """Whether all rows stay within the limit, gradients of keys and values included."""
        most = self._limit.max_bytes
        if not peaks_fit(self.instance(lengths), rows):
            return False
        if most is None or self._work.costs.key_value_bytes == 0.0 or self._slices == 1:
            return True
        timeline = self._work.simulate(self.program(lengths, rows, ""), lengths)
        return max(timeline.peak_bytes or (0.0,)) <= self._limit.most_bytes

    def hand_made(self, lengths: tuple[int, ...]) -> Iterator[SliceOrder]:
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
            order = self.measured(lengths, self.instance(lengths).rows_of(program), name)
            if order is not None:
                yield order

    def measured(
        self, lengths: tuple[int, ...], rows: Rows | None, name: str, rules: DispatchRules | None = None
    ) -> SliceOrder | None:
        """Return rows with their makespan; None if they do not fit, or cannot run."""
        if not rows:
            return None
        times = UnitTimes(self.instance(lengths))
        times.load(rows)
        value = times.makespan()
        if value == math.inf or not self.fits(lengths, rows):
            return None
        return SliceOrder(value, lengths, name, rows, rules)
