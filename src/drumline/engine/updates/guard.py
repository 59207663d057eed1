"""Stop optimizers from stepping on gradients that are not finite on some rank.

torch runs one global hook before any optimizer's step. The hook checks whether the optimizer holds a pipeline's
parameters. If so, that pipeline first settles its last step, which raises NonFiniteError on every rank if any of them
saw a NaN. The hook stays registered next to others; without a pipeline it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

_guards: WeakSet[Guard] = WeakSet()
_guards_by_optimizer: WeakKeyDictionary[Optimizer, tuple[int, list[ref[Guard]]]] = (
    WeakKeyDictionary()
)  # by number of parameters
_hooks: list[Any] = []


class Guard:
    """Calls `before` and `after` around each step of any optimizer that holds one of `parameters`."""

    def __init__(
        self, parameters: Sequence[Tensor], before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
    ) -> None:
        self.before = before
        self.after = after
        self._parameters = [ref(param) for param in parameters]  # not ids: those of freed objects are reused
        _guards.add(self)
        _guards_by_optimizer.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))

    def guards(self, held_ids: Collection[int]) -> bool:
        """Whether any of its living parameters is among the living ones with these ids."""
        return any(id(tensor) in held_ids for reference in self._parameters if (tensor := reference()) is not None)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer not in _guards_by_optimizer or _guards_by_optimizer[optimizer][0] != size:
        held_ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
        _guards_by_optimizer[optimizer] = size, [ref(guard) for guard in _guards if guard.guards(held_ids)]
    for guard in _found_for(optimizer):
        guard.before(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for guard in _found_for(optimizer):
        guard.after(optimizer)


def _found_for(optimizer: Optimizer) -> list[Guard]:
    _, guards = _guards_by_optimizer.get(optimizer, (0, ()))
    return [guard for reference in guards if (guard := reference()) is not None]


def guarded_by(guard: Guard) -> list[Optimizer]:
    """Return the optimizers that have stepped on parameters of a guard."""
    return [optimizer for optimizer in list(_guards_by_optimizer) if guard in _found_for(optimizer)]
