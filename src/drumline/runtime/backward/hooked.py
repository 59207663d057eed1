"""Parameters with hooks on their gradients: what such hooks must not do, and that they change nothing.

A hook that updates its parameter trains with one microbatch at a time. A pipeline has others on their way, which began
with the old weights: autograd refuses some of them without saying why, and recomputed ones are silently wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.backward.tape import accumulate, add_gradients, gradients_at

_MOST = 64  # elements of a parameter that are compared


def with_hooks(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters that have hooks of their own.

    >>> one, other = nn.Parameter(Tensor(1)), nn.Parameter(Tensor(1))
    >>> handle = one.register_hook(print)
    >>> with_hooks([one, other])[0] is one, len(with_hooks([one, other]))
    (True, 1)
    """
    return [param for param in parameters if param._backward_hooks or param._post_accumulate_grad_hooks]


@contextmanager
def refusing_updates(parameters: Sequence[nn.Parameter], *, by_value: bool) -> Iterator[None]:
    """Refuse hooks that change these parameters inside; `by_value`, those that bypass autograd's versions too.

    >>> weight = nn.Parameter(Tensor([1.0]))
    >>> with refusing_updates([weight], by_value=True):
    ...     weight.data.add_(1.0)
    Traceback (most recent call last):
    drumline.core.errors.ModelError: a hook on the gradient of a parameter of shape (1,) changes the parameter, ...
    """
    before = [(param, param._version, _sample(param) if by_value else None) for param in parameters]
    yield
    for param, version, sample in before:
        if param._version != version or (sample is not None and not sample.equal(_sample(param))):
            shape = tuple(param.shape)
            raise updated_inside(f"a hook on the gradient of a parameter of shape {shape} changes the parameter")


@contextmanager
def refusing_changed_sums(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    """Refuse hooks that change the sum of a gradient: it is a part of one, and a copy of the parameter has the rest.

    >>> weight = nn.Parameter(Tensor([1.0]))
    >>> handle = weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(0.5))
    >>> with refusing_changed_sums({"0.weight": weight}):
    ...     (weight * 2).backward()
    Traceback (most recent call last):
    drumline.core.errors.ModelError: a hook changes the gradient of '0.weight' after a microbatch was added to it, ...
    """
    handles = [
        handle
        for name, param in parameters.items()
        if getattr(param, "_post_accumulate_grad_hooks", None)
        for handle in _around_hooks(name, param)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _around_hooks(name: str, parameter: nn.Parameter) -> Iterator[Any]:
    """Have a look at a gradient's sum before its hooks run, and after."""
    before: list[Any] = []

    def look(param: nn.Parameter) -> None:
        before[:] = [] if param.grad is None else [param.grad, *_states(param.grad), *_states(param)]

    def compare(param: nn.Parameter) -> None:
        if not before or not _are_same(before[3:], _states(param)):  # it updates the parameter, which is refused, too
            return
        if param.grad is not before[0] or not _are_same(before[1:3], _states(param.grad)):
            raise ModelError(
                f"a hook changes the gradient of {name!r} after a microbatch was added to it, and another copy of its "
                "stage adds up the other microbatches",
                expected="hooks that leave the sum of a gradient as it is",
                fix="use parameter.register_hook(...), or a schedule with one copy of each stage, such as zb-v",
            )

    hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks
    others = dict(hooks)
    hooks.clear()  # autograd runs them in the order of insertion, whatever `move_to_end` says
    yield parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
    hooks.update(others)
    yield parameter.register_post_accumulate_grad_hook(compare)  # type: ignore[no-untyped-call]


def _states(tensor: Tensor) -> tuple[int, Tensor]:
    return tensor._version, _sample(tensor)


def _are_same(states: Sequence[Any], others: Sequence[Any]) -> bool:
    return bool(states[0] == others[0] and states[1].equal(others[1]))


def _sample(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _MOST)].clone()


def updated_inside(what: str) -> ModelError:
    """Return the error for an update in the middle of a backward."""
    return ModelError(
        f"{what}, in the middle of a step",
        expected="weights that stay the same until all microbatches of the step are done",
        fix="remove the hook, and call optimizer.step() after pipe.step(...)",
    )


# Without the decorators: those of torch share one piece of code.
_BACKWARDS: tuple[CodeType, ...] = tuple(unwrap(run).__code__ for run in (add_gradients, gradients_at, accumulate))


def is_in_backward() -> bool:
    """Whether a backward of a stage is running, and with it this code: it is called by a hook.

    >>> import torch
    >>> torch.no_grad()(is_in_backward)()
    False
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code in _BACKWARDS:
            return True
        frame = frame.f_back
    return False
