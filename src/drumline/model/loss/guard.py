"""A loss that counts nothing, where only the device knows it: its mean is NaN, and so would be its gradient.

The host need not wait to learn which microbatches count something. A loss whose gradient is 0 gives none to what it was
computed from, whatever its formula makes of that.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def guard(tensors: Iterable[Tensor], loss: Tensor) -> None:
    """Let tensors that nothing but this loss uses get no gradient where the loss has none.

    >>> x = torch.ones(2, requires_grad=True)
    >>> loss = (x * 0).sum() / 0.0
    >>> guard([x], loss)
    >>> loss.backward(torch.tensor(0.0))
    >>> loss.isnan(), x.grad
    (tensor(True), tensor([0., 0.]))
    """
    if not loss.requires_grad:
        return
    counts: list[Tensor] = []

    def check_gradient(gradient: Tensor) -> None:
        counts[:] = [gradient != 0]

    def without(gradient: Tensor) -> Tensor:
        return torch.where(counts[0], gradient, 0.0) if counts else gradient

    loss.register_hook(check_gradient)  # type: ignore[no-untyped-call]
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(without)  # type: ignore[no-untyped-call]
