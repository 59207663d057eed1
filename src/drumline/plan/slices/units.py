"""Rows of units on flat lists: their times by the kernel, the rule of slices, what a row holds, and small changes.

Actions are numbers, as in the search of programs: 4 * (stage * units + unit) + op. Unit m*S + s is slice s of
microbatch m.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from drumline.core.graph import Floats, Messages
from drumline.core.kernel.library import kernel, pointer
from drumline.plan.search.bounds.instance import F, Instance, Rows, W
from drumline.plan.search.packed import PackedInstance
from drumline.plan.search.row_times import clock


@dataclass(frozen=True)
class UnitInstance(Instance):
    """An instance over units, whose seconds are given: (stages, units, ops)."""

    table: Floats | None = None

    @cached_property
    def times(self) -> Floats:
        """The seconds of every action."""
        assert self.table is not None, "units have seconds of their own"
        return self.table


class UnitTimes:
    """Times rows that change a little from one time to the next, without copying all of them."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._packed = PackedInstance(instance)
        self._library = None if instance.messages is Messages.BLOCKING else kernel()
        self._clock = clock(instance) if self._library is None else None
        num_ranks = instance.num_ranks
        self._ready, self._begin = np.empty(instance.num_actions + 1), np.zeros(num_ranks)
        self._first, self._last = np.empty((2, num_ranks))
        self.load([[] for _ in range(num_ranks)])

    def load(self, rows: Rows) -> None:
        """Take other rows."""
        self._rows = [list(row) for row in rows]
        self._flat, self._lengths = self._packed.flat(rows)
        arrays = self._flat, self._lengths, self._begin, self._ready, self._first, self._last
        self._pointers = [pointer(array) for array in arrays]

    def put(self, rank: int, first: int, numbers: Sequence[int]) -> None:
        """Replace numbers of a row from a place on."""
        self._rows[rank][first : first + len(numbers)] = numbers
        offset = int(self._packed.offsets[rank]) + first
        self._flat[offset : offset + len(numbers)] = numbers

    def makespan(self) -> float:
        """Return when the last rank ends; infinite if ranks wait for each other.

        >>> from drumline.core.costs import Costs
        >>> from drumline.core.placement import Placement
        >>> times = UnitTimes(Instance(Costs(), Placement.linear(2), num_microbatches=1))
        >>> times.load([[0, 3], [4, 7]])
        >>> times.makespan()
        6.0
        """
        if self._library is None:
            assert self._clock is not None
            timed = self._clock(self._rows, [0.0] * len(self._rows))
            return math.inf if timed is None else max(end for _, end in timed[0])
        done = self._library.rows(self._packed.address, *self._pointers)
        if done < 0:
            raise MemoryError(f"no memory to time {self._instance.num_actions} actions")
        return float(self._last.max()) if done else math.inf


class UnitRule:
    """The rule of slices within a row: which of two actions must stay before the other.

    >>> rule = UnitRule(num_units=4, num_slices=2)
    >>> rule.keeps(0, 4), rule.keeps(0, 8), rule.keeps(0, 3)  # F0 before F1, F0 and F2, F0 and its own B
    (True, False, True)
    """

    def __init__(self, num_units: int, num_slices: int) -> None:
        self._units, self._slices = num_units, num_slices

    def keeps(self, earlier: int, later: int) -> bool:
        """Whether the earlier one must stay before the later one: of one microbatch on one stage."""
        pair, op = divmod(earlier, 4)
        other, other_op = divmod(later, 4)
        stage, unit = divmod(pair, self._units)
        other_stage, other_unit = divmod(other, self._units)
        if stage != other_stage:
            return False
        if unit // self._slices != other_unit // self._slices:
            return False
        if op == F:
            return other_op != W or unit == other_unit
        if op == W or other_op == F:
            return False
        return other_op != W or unit == other_unit


def peaks_fit(instance: Instance, rows: Rows) -> bool:
    """Whether every row stays within the limit of its instance.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> from drumline.core.timeline.idle import Limit
    >>> instance = Instance(Costs(activation_bytes=2.0), Placement.linear(1), 2, Limit(max_bytes=3.0))
    >>> peaks_fit(instance, [[0, 3, 4, 7]]), peaks_fit(instance, [[0, 4, 3, 7]])
    (True, False)
    """
    return not instance.resources or all(instance.fits(row, rank) for rank, row in enumerate(rows))
