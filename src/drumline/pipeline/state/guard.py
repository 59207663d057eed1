"""Keeps optimizers from stepping on gradients that are not finite on some rank.

torch lets one hook run before any optimizer's step. It looks whether the optimizer holds parameters of a pipeline, and
if so lets that pipeline settle its last step first, which raises NonFiniteError on every rank if any saw a NaN.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_guarded: defaultdict[int, WeakSet[Guard]] = defaultdict(WeakSet)  # by parameter
_found: WeakKeyDictionary[Optimizer, WeakSet[Guard]] = WeakKeyDictionary()
_hooks: list[Any] = []


class Guard:
    """Calls `before` and `after` with any optimizer that holds one of `parameters`, around each of its steps."""

    def __init__(
        self, parameters: list[Tensor], before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
    ) -> None:
        self.before = before
        self.after = after
        for parameter in parameters:
            _guarded[id(parameter)].add(self)
        _found.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _found:
        held = [one for group in optimizer.param_groups for one in group["params"]]
        _found[optimizer] = WeakSet(guard for one in held for guard in _guarded.get(id(one), ()))
    for guard in list(_found[optimizer]):
        guard.before(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for guard in list(_found.get(optimizer, ())):
        guard.after(optimizer)
