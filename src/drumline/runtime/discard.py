"""Run a forward as training runs it, and keep nothing for a backward.

A checkpointed segment runs twice, and both runs must compute the same bits. Some kernels and modules ask whether
gradients are on: oneDNN's LSTM takes another kernel on x86, a transformer layer in eval mode takes a fused one on every
processor, and Python code may branch. So the first run records a graph like the second, but saves no tensor in it:

    torch.no_grad()    other kernels, nothing saved
    discarding()       the kernels of training, nothing saved
    torch.enable_grad  the kernels of training, everything saved
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class GraphNeeded(BaseException):
    """Ends a forward that takes a gradient of its own; a model's own `except Exception` must not catch it."""


def _discard(tensor: Tensor) -> None:
    """Save nothing."""


def _missing(saved: None) -> NoReturn:
    raise GraphNeeded(
        "a gradient is asked of the first run of a recomputed block, which keeps no graph; "
        "return the tensor from the block instead of keeping it in an attribute"
    )


@contextmanager
def discarding() -> Iterator[None]:
    """Record a graph in which no tensor is saved; a forward that needs one raises GraphNeeded.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> with discarding():
    ...     loss = (weight * weight).sum()
    >>> loss.requires_grad
    True
    """
    try:
        with torch.enable_grad(), saved_tensors_hooks(_discard, _missing):
            yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise GraphNeeded from error  # torch.func's gradients refuse such hooks
