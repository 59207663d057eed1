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
from torch.optim.optimizer import register_optimizer_step_pre_hook

_guarded: defaultdict[int, WeakSet[Guard]] = defaultdict(WeakSet)  # by parameter
_found: WeakKeyDictionary[Optimizer, WeakSet[Guard]] = WeakKeyDictionary()
_hooks: list[Any] = []


class Guard:
    """Calls `before` with any optimizer that holds one of `parameters` and is to step, as long as it is alive."""

    def __init__(self, parameters: list[Tensor], before: Callable[[Optimizer], None]) -> None:
        self.before = before
        for parameter in parameters:
            _guarded[id(parameter)].add(self)
        _found.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _found:
        held = [one for group in optimizer.param_groups for one in group["params"]]
        _found[optimizer] = WeakSet(guard for one in held for guard in _guarded.get(id(one), ()))
    for guard in list(_found[optimizer]):
        guard.before(optimizer)
