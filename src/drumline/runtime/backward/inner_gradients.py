"""Gradients that a model takes inside its own forward: an energy's forces, a gradient penalty, torch.func.grad.

Layers whose weight gradients wait for W compute with stand-ins of their parameters, so a gradient of a gradient through
them would pass the parameters by. Therefore, while a forward is recorded, a call of autograd's engine is stopped before
it does anything, and the forward begins again with all layers as they are: I then finds their gradients as ordinary
ones, and W adds them. Right, only early; and it is remembered, so that later forwards are run like this at once.

The same holds for a hook on what a layer returned (`h.register_hook`): the gradient that W is given there has not been
through it; and for a layer that uses a tensor beside its arguments, whose gradient would end there. Such a forward
begins again, too, with all layers as they are.

A forward that is not recorded, which is any of a schedule without split backwards, replaces nothing of torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from drumline.runtime.backward.tape import Tape
from drumline.runtime.patches import Patch, Replaced

_interpreter: Any = torch._C._functorch.peek_interpreter_stack


def transformed() -> bool:
    """Whether this runs inside of a function transform (torch.func), or with forward derivatives.

    >>> torch.func.vmap(lambda x: x * transformed())(torch.ones(2)), transformed()
    (tensor([1., 1.]), False)
    """
    return forward_ad._current_level >= 0 or _interpreter() is not None


class TakesGradients(BaseException):
    """Ends a recorded forward that calls autograd's engine; no model's own `except Exception` is to catch it."""


class Lookout:
    """Watches a forward that is recorded on a tape: calls of autograd's engine, and hooks on what its layers returned.

    >>> with Lookout(Tape()):
    ...     torch.ones(1, requires_grad=True).backward()
    Traceback (most recent call last):
    drumline.runtime.backward.inner_gradients.TakesGradients
    """

    __slots__ = ("seen", "tape")

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.seen = False  # whether the forward has to begin again; it may have caught what was raised

    def __enter__(self) -> Lookout:
        _engine.enter(self)
        _hooks.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        _hooks.leave()
        _engine.leave()

    def stop(self) -> None:
        """End the forward, for it to begin again with layers as they are."""
        self.seen = True
        raise TakesGradients


def begin_again() -> None:
    """End a recorded forward that a record would not do justice to, for it to begin again with layers as they are."""
    if (lookout := _engine.watcher) is not None:
        lookout.stop()


class _Engine:
    """Stands in for autograd's engine: all calls from Python come by here."""

    def __init__(self, replaced: Replaced) -> None:
        self._replaced = replaced

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replaced.found, name)

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the engine, unless the forward that calls it is recorded."""
        if (lookout := self._replaced.watcher) is not None:
            lookout.stop()
        return self._replaced.found.run_backward(*args, **kwargs)


def _hooking(replaced: Replaced) -> Callable[..., Any]:
    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        """Register a hook, unless a gradient that a record needs would pass it by."""
        if (lookout := replaced.watcher) is not None:
            node = tensor.grad_fn
            if any(place.node is node for record in lookout.tape.records for place in record.places):
                lookout.stop()
        return replaced.found(tensor, hook)

    return register_hook


_engine = Patch(torch.autograd.Variable, "_execution_engine", _Engine)
_hooks = Patch(Tensor, "register_hook", _hooking)
