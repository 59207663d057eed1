"""Parameters with hooks on their gradients: what such hooks must not do, and that they change nothing.

A hook that updates its parameter trains with one microbatch at a time. A pipeline has others on their way, which began
with the old weights: autograd refuses some of them without saying why, and recomputed ones are silently wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.hooks import hooks_behind, with_holders
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

    >>> __name__ = "mine"  # not a part of this library
    >>> def halve(param):
    ...     param.grad.mul_(0.5)
    >>> weight = nn.Parameter(Tensor([1.0]))
    >>> handle = weight.register_post_accumulate_grad_hook(halve)
    >>> with refusing_changed_sums({"0.weight": weight}):
    ...     (weight * 2).backward()
    Traceback (most recent call last):
    drumline.core.errors.ModelError: a hook changes the gradient of '0.weight' after a microbatch was added to it, ...
    """
    ends = [end for name, param in parameters.items() for end in _around_hooks(name, param)]
    held_nodes = {id(param) for param in with_holders(parameters.values())}
    ends += [end for name, param in parameters.items() if id(param) in held_nodes for end in _around_node(name, param)]
    try:
        yield
    finally:
        for end in ends:
            end()


def _around_hooks(name: str, parameter: nn.Parameter) -> Iterator[Callable[[], object]]:
    """Have a look at a gradient's sum before the user's hooks run, and after; yield what ends that."""
    hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    ours = {number: hook for number, hook in hooks.items() if _is_ours(hook)}  # of checks, which take it away
    theirs = {number: hook for number, hook in hooks.items() if number not in ours}
    if theirs:
        look, compare = _looks(name, parameter)
        hooks.clear()  # autograd runs them in the order of insertion, whatever `move_to_end` says
        yield parameter.register_post_accumulate_grad_hook(look).remove  # type: ignore[no-untyped-call]
        hooks.update(theirs)
        yield parameter.register_post_accumulate_grad_hook(compare).remove  # type: ignore[no-untyped-call]
        hooks.update(ours)


def _around_node(name: str, parameter: nn.Parameter) -> Iterator[Callable[[], object]]:
    """Do so around hooks of the node that adds up the gradient."""
    table = hooks_behind(parameter)
    if theirs := dict(table):
        look, compare = _looks(name, parameter)
        table.clear()
        table.update({-1: look, **theirs, -2: compare})
        yield lambda: [table.pop(number, None) for number in (-1, -2)]


def _looks(name: str, parameter: nn.Parameter) -> tuple[Callable[..., None], Callable[..., None]]:
    before: list[Any] = []

    def look(*_: Any) -> None:
        gradient = parameter.grad
        before[:] = [] if gradient is None else [gradient, *_states(gradient), *_states(parameter)]

    def compare(*_: Any) -> None:
        if not before or not _are_same(before[3:], _states(parameter)):  # updates are refused, too
            return
        gradient: Any = before[0]
        if parameter.grad is not gradient or not _are_same(before[1:3], _states(gradient)):
            raise ModelError(
                f"a hook changes the gradient of {name!r} after a microbatch was added to it, and another copy of its "
                "stage adds up the other microbatches",
                expected="hooks that leave the sum of a gradient as it is",
                fix="use parameter.register_hook(...), or a schedule with one copy of each stage, such as zb-v",
            )

    return look, compare


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "__func__", hook)
    return str(getattr(function, "__module__", "")).startswith("drumline.")


def _states(tensor: Any) -> tuple[int, Tensor]:
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
