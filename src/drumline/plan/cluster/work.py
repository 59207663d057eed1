"""Seconds of one microbatch, by what they are spent on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of computing, and of messages that computing does not hide.

    >>> (Work(1.0, tensor=0.5) + Work(2.0)).total
    3.5
    """

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """Return all seconds."""
        return self.compute + self.tensor + self.context + self.expert

    def __add__(self, other: Work) -> Work:
        return Work(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def times(self, factor: float) -> Work:
        """Return this much of it."""
        return Work(self.compute * factor, self.tensor * factor, self.context * factor, self.expert * factor)


@dataclass(frozen=True, slots=True)
class Ops:
    """What one microbatch takes in a layer or a stage: forward, what is computed again, both halves of backward."""

    forward: Work = Work()
    again: Work = Work()
    backward_input: Work = Work()
    backward_weight: Work = Work()

    @property
    def backward(self) -> Work:
        """Return a whole backward, with what it computes again."""
        return self.again + self.backward_input + self.backward_weight

    @property
    def total(self) -> Work:
        """Return all of it."""
        return self.forward + self.backward

    def __add__(self, other: Ops) -> Ops:
        return Ops(
            self.forward + other.forward,
            self.again + other.again,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def times(self, factor: float) -> Ops:
        """Return this much of it."""
        return Ops(
            self.forward.times(factor),
            self.again.times(factor),
            self.backward_input.times(factor),
            self.backward_weight.times(factor),
        )
