"""What a loss keeps between its calls is put back after calls that must leave no trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from drumline.model.watch.keeping import undisturbed

pytestmark = pytest.mark.torch

Loss = Callable[[Tensor], Any]
_calls = 0
_log: list[int] = []


class Counter(nn.Module):
    """Counts in a buffer, an attribute and a list."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.number = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.number += 1
        self.seen.append(len(x))
        return x.sum()


class Trainer:
    """Has a loss as a method, and a module that it calls."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.counter = Counter()
        self.mean = torch.zeros(2)

    def loss(self, x: Tensor) -> Any:
        self.losses.append(x)
        self.mean += 1
        self.last = x
        return self.counter(x)


def in_globals(x: Tensor) -> None:
    global _calls
    _calls += 1
    _log.append(len(x))


def of_module() -> tuple[Loss, Callable[[], Any]]:
    counter = Counter()
    return counter, lambda: (float(counter.calls), counter.number, counter.seen)


def of_method() -> tuple[Loss, Callable[[], Any]]:
    trainer = Trainer()
    return trainer.loss, lambda: (
        trainer.losses,
        trainer.mean.tolist(),
        hasattr(trainer, "last"),
        trainer.counter.number,
        trainer.counter.seen,
    )


def of_closure() -> tuple[Loss, Callable[[], Any]]:
    counter, number = Counter(), 0

    def inner(x: Tensor) -> None:
        nonlocal number
        number += 1
        counter(x)

    return lambda x: inner(x), lambda: (number, float(counter.calls), counter.seen)


def of_partial() -> tuple[Loss, Callable[[], Any]]:
    counter, seen = Counter(), list[int]()

    def loss(module: nn.Module, x: Tensor, *, kept: list[int]) -> None:
        kept.append(len(x))
        module(x)

    return partial(loss, counter, kept=seen), lambda: (seen, counter.number)


def of_default() -> tuple[Loss, Callable[[], Any]]:
    seen: list[int] = []

    def loss(x: Tensor, kept: list[int] = seen) -> None:
        kept.append(len(x))
        loss.calls = 1  # type: ignore[attr-defined]

    return loss, lambda: (seen, hasattr(loss, "calls"))


@pytest.mark.parametrize("make", [of_module, of_method, of_closure, of_partial, of_default])
def test_a_call_of_a_loss_leaves_no_trace(make: Callable[[], tuple[Loss, Callable[[], Any]]]) -> None:
    loss, state = make()
    before = repr(state())
    with undisturbed(loss=loss):
        loss(torch.ones(3))
        assert repr(state()) != before
    assert repr(state()) == before


def test_generators_that_modules_hold_draw_again() -> None:
    module: Any = nn.Identity()
    module.drawn = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()]
    module.system = random.SystemRandom()  # has no state

    def draw() -> list[float]:
        python, numpy, legacy, own = module.drawn
        return [python.random(), numpy.random(), legacy.random_sample(), float(torch.rand((), generator=own))]

    with undisturbed([module]):
        first = draw()
    assert draw() == first


def test_global_variables_of_a_loss_are_put_back() -> None:
    with undisturbed(loss=in_globals):
        in_globals(torch.ones(3))
        assert (_calls, _log) == (1, [3])
    assert (_calls, _log) == (0, [])
