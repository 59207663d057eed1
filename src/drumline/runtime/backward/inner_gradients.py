"""Gradients that a model takes inside its own forward: an energy's forces, a gradient penalty, torch.func.grad.

Layers whose weight gradients wait for W compute with stand-ins of their parameters, so a gradient of a gradient through
them would pass the parameters by. Therefore, while a forward is recorded, a call of autograd's engine is stopped before
it does anything, and the forward begins again with all layers as they are: I then finds their gradients as ordinary
ones, and W adds them. Right, only early; and it is remembered, so that later forwards are run like this at once.

The same holds for a hook on what a layer returned (`h.register_hook`): the gradient that W is given there has not been
through it; and for a layer that uses a tensor beside its arguments, whose gradient would end there. Such a forward
begins again, too, with all layers as they are.

A stage sees what it received as beginnings of the graph. A gradient with respect to one of several such tensors would
miss what reaches the others from it in the stages before, and is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from drumline.core.errors import ModelError
from drumline.runtime.backward.tape import Tape
from drumline.runtime.buffers import Buffers

_variable: Any = torch.autograd.Variable
_engine: Any = _variable._execution_engine
_tensor: Any = Tensor
_register_hook: Any = Tensor.register_hook
_interpreter: Any = torch._C._functorch.peek_interpreter_stack


def transformed() -> bool:
    """Whether this runs inside of a function transform (torch.func), or with forward derivatives.

    >>> torch.func.vmap(lambda x: x * transformed())(torch.ones(2)), transformed()
    (tensor([1., 1.]), False)
    """
    return forward_ad._current_level >= 0 or _interpreter() is not None


class _TakesGradients(BaseException):
    """Ends a recorded forward that calls autograd's engine; no model's own `except Exception` is to catch it."""


class Lookout:
    """Stands in for autograd's engine while a forward runs: all calls from Python come by here.

    With a tape, what is recorded on it is looked after: hooks on what its layers returned come by here too.
    """

    __slots__ = ("received", "seen", "tape", "thread")

    def __init__(self, received: Sequence[Tensor], *, tape: Tape | None = None) -> None:
        self.received = received
        self.tape = tape
        self.seen = False
        self.thread = threading.get_ident()

    def __enter__(self) -> Lookout:
        _variable._execution_engine = self
        if self.tape is not None:
            _tensor.register_hook = self._hooking()
        return self

    def __exit__(self, *_: object) -> None:
        _variable._execution_engine = _engine
        if self.tape is not None:
            _tensor.register_hook = _register_hook

    def _hooking(self) -> Callable[..., Any]:
        def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
            """Register a hook, unless a gradient that a record needs would pass it by."""
            if self.tape is not None and threading.get_ident() == self.thread:
                node = tensor.grad_fn
                if any(place.node is node for record in self.tape.records for place in record.places):
                    begin_again()
            return _register_hook(tensor, hook)

        return register_hook

    def __getattr__(self, name: str) -> Any:
        return getattr(_engine, name)

    def run_backward(
        self, roots: Any, gradients: Any, keep: bool, create: bool, inputs: Any = (), *args: Any, **kwargs: Any
    ) -> Any:
        """Run the engine, unless the forward is recorded or the gradient would be part of the right one."""
        if threading.get_ident() == self.thread:
            _refuse_part(inputs, self.received)
            if self.tape is not None:
                self.seen = True
                raise _TakesGradients
        return _engine.run_backward(roots, gradients, keep, create, inputs, *args, **kwargs)


def begin_again() -> None:
    """End a recorded forward that a record would not do justice to, for it to begin again with layers as they are."""
    lookout = _variable._execution_engine
    if isinstance(lookout, Lookout) and lookout.tape is not None:
        lookout.seen = True
        raise _TakesGradients


def _refuse_part(inputs: Sequence[Any], received: Sequence[Tensor]) -> None:
    apart = [one for one in received if one.is_floating_point() or one.is_complex()]
    if len(apart) > 1 and any(one is other for one in inputs for other in apart):
        raise ModelError(
            f"a block takes the gradient of one of {len(apart)} tensors that it received from the stage before",
            expected="none: what reaches the other tensors from this one in earlier stages would be missing",
            fix="take it in the block that makes the tensor; or of x = x.view_as(x), if the others do not depend on it",
        )


class _Segment(Protocol):
    buffers: Buffers
    takes_gradients: bool | None

    def unchanged(self, value: Any, versions: list[int]) -> None: ...


def recorded(
    segment: _Segment, tape: Tape, leaves: Sequence[Tensor], received: Sequence[Tensor], run: Callable[[bool], Any]
) -> Any:
    """Return what `run` makes of a segment, recorded on `tape` if it takes no gradients itself."""
    if not segment.takes_gradients:
        before = segment.buffers.copies() if segment.takes_gradients is None else None
        versions = [one._version for one in leaves]
        value = None
        lookout = Lookout(received, tape=tape)
        try:
            with lookout:
                value = run(True)
        except _TakesGradients:
            pass
        if not lookout.seen:
            segment.takes_gradients = False
            return value
        tape.records.clear()
        segment.unchanged(leaves, versions)
        if before is not None:
            segment.buffers.put_back(before)
        elif segment.buffers.places:
            raise ModelError(
                "a block with buffers begins to take gradients inside its forward after it has taken none",
                fix="choose a schedule without split backwards, such as 1f1b",
            )
        segment.takes_gradients = True
    with Lookout(received):
        value = run(False)
    if any(leaf.grad is not None for leaf in leaves):
        raise ModelError(
            "a block calls backward() inside its forward, which reaches what it received from the stage before",
            fix="use torch.autograd.grad, or a schedule without split backwards, such as 1f1b",
        )
    return value
