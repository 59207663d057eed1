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
    >>> with draws.noted(3):
    ...     drawn = torch.rand(2)
    >>> with draws.again(3, step=0):
    ...     bool((torch.rand(2) == drawn).all())
    True
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._torch = Randomness(seed, device)
        self._before: dict[int, tuple[HostChance, list[Tensor]]] = {}

    @contextmanager
    def noted(self, number: int) -> Iterator[None]:
        """Note from where a microbatch draws inside, if it does."""
        host, states = before = self.states()
        yield
        self._before.pop(number, None)
        if host.has_moved() or self._torch.has_moved(states):
            self._before[number] = before

    @contextmanager
    def again(self, number: int, step: int) -> Iterator[None]:
        """Draw what this microbatch has drawn, or else numbers of its own."""
        with self._torch.kept_aside(), HostChance().keeping_state():
            if number in self._before:
                self.go_on(self._before[number])
            else:
                self._torch.step = step
                seed = self._torch.seed_for(number, "compute_loss")
                self._torch.seed_all(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
            yield

    def states(self) -> tuple[HostChance, list[Tensor]]:
        """Return the states of all generators, to be sent to other ranks."""
        return HostChance(), self._torch.states()

    def go_on(self, states: Any) -> None:
        """Draw from these states from now on."""
        host, generators = states
        host.restore()
        self._torch.go_on(generators)
