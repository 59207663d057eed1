"""Gradients that a forward takes with respect to what its stage received.

A stage sees what it received as beginnings of the graph. A gradient with respect to one of several such tensors would
miss what reaches the others from it in the stages before, and is refused: by a hook on the tensor, when it arrives
there, or when autograd says that the tensor wants none. Of which tensors it was asked is read off torch's own frames.
Nothing of torch's is replaced for that, and a stage that receives one tensor has nothing to look after.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError

_ASKING = (torch.autograd.grad.__code__, torch.autograd.backward.__code__)
_NOTHING: AbstractContextManager[None] = nullcontext()


def looked_after(received: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Refuse gradients with respect to one of several received tensors inside.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> with looked_after([x, y]):
    ...     _ = torch.autograd.grad((x * y).sum(), x)
    Traceback (most recent call last):
    drumline.core.errors.ModelError: a block takes the gradient of one of 2 tensors that it received from the stage ...
    """
    return _several(received) if len(received) > 1 else _NOTHING


@contextmanager
def _several(received: Sequence[Tensor]) -> Iterator[None]:
    apart = [one for one in received if one.is_floating_point() or one.is_complex()]
    if len(apart) < 2:
        yield
        return

    def arrived(gradient: Tensor) -> None:
        if _is_asked(_callers(), apart):
            raise _refusal(len(apart))

    without = [one for one in apart if not one.requires_grad]
    hooks = [one.register_hook(arrived) for one in apart if one.requires_grad]  # type: ignore[no-untyped-call]
    try:
        yield
    except RuntimeError as error:
        if _is_asked((frame for frame, _ in traceback.walk_tb(error.__traceback__)), apart):
            raise _refusal(len(apart)) from error
        raise
    finally:
        for hook in hooks:
            hook.remove()
    if not torch.is_grad_enabled() and any(one.requires_grad for one in without):
        raise _refusal(len(apart))  # nobody trains here, so a gradient of it was taken


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_asked(frames: Iterable[FrameType], tensors: Sequence[Tensor]) -> bool:
    """Whether a call of autograd among the frames asks for the gradient of one of the tensors."""
    asked: list[Any] = []
    for frame in frames:
        if frame.f_code in _ASKING:
            inputs = frame.f_locals.get("inputs")
            asked += [inputs] if isinstance(inputs, Tensor) else inputs or ()
    return any(one is other for one in asked for other in tensors)


def _refusal(number: int) -> ModelError:
    return ModelError(
        f"a block takes the gradient of one of {number} tensors that it received from the stage before",
        expected="none: what reaches the other tensors from this one in earlier stages would be missing",
        fix="take it in the block that makes the tensor; or of x = x.view_as(x), if the others do not depend on it",
    )
