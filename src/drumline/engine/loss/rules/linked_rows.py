"""Rows of an output that keep their graph, for a loss that takes gradients of its outputs with respect to others.

::

    output    x ──► energy                 both from the last stage, with the graph between them
    rows      x[0:3], energy[0:3]          copies: nothing leads from the one to the other
    asked     gradient of energy[0:3] with respect to x[0:3]
    answered  rows 0 to 2 of the gradient of energy[0:3] with respect to x
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drumline.engine.loss.rules.rows import Places
from drumline.model.values import pack, unpack


class LinkedRows(TorchFunctionMode):
    """Copies of an output's rows, and gradients with respect to them, while it is entered.

    >>> x = torch.ones(3, requires_grad=True)
    >>> output = x * 1.0
    >>> linked = LinkedRows((output, output**2), ((0, 1), (0, 1)), 1, 3)
    >>> with linked:
    ...     torch.autograd.grad(linked.output[1].sum(), linked.output[0])
    (tensor([2., 2.]),)
    """

    def __init__(self, output: Any, places: Places, first: int, end: int) -> None:
        super().__init__()
        tensors, form = pack(output)
        self._range = first, end
        copies = [self.rows_of(tensor, place).clone() for tensor, place in zip(tensors, places, strict=True)]
        self.output = unpack(copies, form)
        whole = zip(tensors, places, strict=True)
        self._whole = {id(copy): pair for copy, pair in zip(copies, whole, strict=True)}

    def rows_of(self, tensor: Tensor, place: tuple[int, int] | None) -> Tensor:
        """Return the same rows of another tensor."""
        first, end = self._range
        return tensor if place is None else tensor.narrow(place[0], first * place[1], (end - first) * place[1])

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what is asked of gradients; the graph stays, because the step needs it too."""
        named = dict(kwargs or {})
        if func is not torch.autograd.grad:
            return func(*args, **named)
        outputs, inputs = args[:2]
        wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        whole = [self._whole.get(id(tensor), (tensor, None)) for tensor in wanted]
        tensors = func(outputs, [row for row, _ in whole], *args[2:], **{**named, "retain_graph": True})
        pairs = zip(tensors, whole, strict=True)
        return tuple(None if tensor is None else self.rows_of(tensor, place) for tensor, (_, place) in pairs)
