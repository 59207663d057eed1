"""Keeps optimizers from stepping on gradients that are not finite on some rank.

torch lets one hook run before any optimizer's step. It looks whether the optimizer holds parameters of a pipeline, and
if so lets that pipeline settle its last step first, which raises NonFiniteError on every rank if any saw a NaN.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

_guarded: Any = WeakTensorKeyDictionary()  # parameter -> WeakSet[Guard]
_found: WeakKeyDictionary[Optimizer, WeakSet[Guard]] = WeakKeyDictionary()
_hooks: list[Any] = []


class Guarded(Protocol):
    """What is told of every step of an optimizer that holds one of its parameters."""

    def before_update(self, optimizer: Optimizer) -> None:
        """Hear of it before anything is updated; raises to keep the optimizer from it."""

    def after_update(self) -> None:
        """Hear that all was updated."""


class Guard:
    """Stands between optimizers and the parameters of a pipeline, which it is told to `watch`."""

    def __init__(self, guarded: Guarded) -> None:
        self.guarded = guarded

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """Have each step of any optimizer told that holds one of these, besides those from before."""
        for parameter in parameters:
            _guarded.setdefault(parameter, WeakSet()).add(self)
        _found.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _found:
        held = [one for group in optimizer.param_groups for one in group["params"]]
        _found[optimizer] = WeakSet(guard for one in held for guard in _guarded.get(one, ()))
    for guard in list(_found[optimizer]):
        guard.guarded.before_update(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for guard in list(_found.get(optimizer, ())):
        guard.guarded.after_update()
