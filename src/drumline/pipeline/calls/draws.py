"""Random numbers of a function that runs twice for a microbatch, and to its end on one rank only."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumline.model.randomness import HostChance, Randomness


class TwiceDrawn:
    """Random numbers before and after a call of the model.

        before the call    every rank draws them; the rank with the last stage then draws the same again
        after the call     seeded by step and microbatch, because only one rank draws them

    All generators go on as if nothing had been drawn after the call, so that all ranks read the same data.

    >>> draws = TwiceDrawn(0, torch.device("cpu"))
    >>> drawn = [torch.rand(2) for number in draws.noted(4)]
    >>> with draws.again(3, step=0):
    ...     bool((torch.rand(2) == drawn[3]).all())
    True
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._torch = Randomness(seed, device)
        self._before: dict[int, tuple[HostChance, list[Tensor]]] = {}
        self._last: HostChance | None = None  # from which the next state is read in less time

    def noted(self, count: int) -> Iterator[int]:
        """Yield numbers of microbatches, and note from where each draws until the next one, if it does."""
        self._before.clear()
        host, generators = before = self.states()
        for number in range(count):
            yield number
            after = self.states()
            if host.differs_from(after[0]) or any(map(_differ, generators, after[1])):
                self._before[number] = before
            host, generators = before = after

    @contextmanager
    def again(self, number: int, step: int) -> Iterator[None]:
        """Draw what this microbatch has drawn, or else numbers of its own."""
        states = self.states()
        try:
            if number in self._before:
                self.go_on(self._before[number])
            else:
                self._torch.step = step
                seed = self._torch.seed_for(number, "compute_loss")
                self._torch.seed_all(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
            yield
        finally:
            self.go_on(states)

    def states(self) -> tuple[HostChance, list[Tensor]]:
        """Return the states of all generators, to be sent to other ranks."""
        self._last = HostChance(since=self._last)
        return self._last, self._torch.states()

    def go_on(self, states: Any) -> None:
        """Draw from these states from now on."""
        host, generators = states
        host.restore()
        self._torch.go_on(generators)


def _differ(before: Tensor, after: Tensor) -> bool:
    return not torch.equal(before, after)
