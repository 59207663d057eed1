"""Autograd's engine, called directly.

`torch.autograd.backward` and `grad` check what they are given in Python, some 60 microseconds a call: as much as a
small layer. The engine checks shapes and types itself, and everything that is handed to it here was made by a stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

_run: Any = torch._C._ImperativeEngine().run_backward  # not that of whoever has replaced torch's


def backward(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of everything below `roots` to the leaves.

    >>> from torch.autograd.graph import get_gradient_edge
    >>> x = torch.ones(2, requires_grad=True)
    >>> backward([get_gradient_edge(x * 3)], [torch.ones(2)])
    >>> x.grad
    tensor([3., 3.])
    """
    _run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_at(
    places: Sequence[GradientEdge | Tensor], roots: Sequence[GradientEdge], gradients: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients at `places`, None where none arrives, computing only what leads to them.

    >>> from torch.autograd.graph import get_gradient_edge
    >>> x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> gradients_at([x, w], [get_gradient_edge(x * 3)], [torch.ones(2)])
    (tensor([3., 3.]), None)
    """
    found: tuple[Tensor | None, ...] = _run(
        tuple(roots), tuple(gradients), False, False, tuple(places), allow_unreachable=True, accumulate_grad=False
    )
    return found
