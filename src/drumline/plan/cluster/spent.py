"""Seconds grouped by what they are spent on (`Spent`), and by the pass of a microbatch that they belong to (`Ops`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from typing import NamedTuple


class Spent(NamedTuple):
    """Seconds of compute, and of messages that compute does not hide.

    >>> (Spent(1.0, tensor=0.5) + Spent(2.0)).total
    3.5
    """

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """Return all seconds."""
        compute, tensor, context, expert = self
        return compute + tensor + context + expert

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        compute, tensor, context, expert = self
        more = other[0] + compute, other[1] + tensor, other[2] + context, other[3] + expert
        return tuple.__new__(Spent, more)  # a plan adds up millions: this takes half the time of calling Spent

    def times(self, factor: float) -> Spent:
        """Return the seconds times a factor."""
        return Spent(self.compute * factor, self.tensor * factor, self.context * factor, self.expert * factor)


class Ops(NamedTuple):
    """Seconds of one microbatch in a layer or a stage: forward, recomputation, both halves of the backward."""

    forward: Spent = Spent()
    again: Spent = Spent()
    backward_input: Spent = Spent()
    backward_weight: Spent = Spent()

    @property
    def backward(self) -> Spent:
        """Return the whole backward, with its recomputation."""
        return self.again + self.backward_input + self.backward_weight

    @property
    def whole(self) -> Ops:
        """Return the same with W as a part of I."""
        return Ops(self.forward, self.again, self.backward_input + self.backward_weight)

    @property
    def total(self) -> Spent:
        """Return the sum of all parts."""
        return self.forward + self.backward

    def __add__(self, other: Ops) -> Ops:  # type: ignore[override]
        forward, again, by_input, by_weight = self
        return Ops(forward + other[0], again + other[1], by_input + other[2], by_weight + other[3])

    def times(self, factor: float) -> Ops:
        """Return the seconds times a factor."""
        if factor == 1:
            return self
        return Ops(
            self.forward.times(factor),
            self.again.times(factor),
            self.backward_input.times(factor),
            self.backward_weight.times(factor),
        )


def all_ops(parts: Sequence[Ops]) -> Ops:
    """Return the sum of parts, added up in their order.

    >>> all_ops([Ops(Spent(1.0))] * 3).forward, all_ops([]) == Ops()
    (Spent(compute=3.0, tensor=0.0, context=0.0, expert=0.0), True)
    """
    if len(parts) <= 2:
        return reduce(Ops.__add__, parts) if parts else Ops()
    passes = (zip(*each, strict=True) for each in zip(*parts, strict=True))
    return Ops(*(Spent(*(reduce(add, items) for items in each)) for each in passes))
