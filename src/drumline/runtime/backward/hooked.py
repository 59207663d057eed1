"""Parameters with hooks on their gradients: what such hooks must not do, and that they change nothing.

A hook that updates its parameter trains with one microbatch at a time. A pipeline has others on their way, which began
with the old weights: autograd refuses some of them without saying why, and recomputed ones are silently wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from inspect import unwrap
from types import CodeType, FrameType

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


def _sample(parameter: nn.Parameter) -> Tensor:
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
