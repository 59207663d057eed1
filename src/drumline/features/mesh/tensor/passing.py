"""What tensor-parallel layers exchange in the middle of a forward and its backward.

    forward               backward
    copied    as it is             sum over tp           before a layer divided by columns
    summed    sum over tp          as it is              after a layer divided by rows
    gathered  all parts            own part              the whole output of a layer divided by columns
    split     own part             all parts             the own part of a whole input
    spread    all parts            own part of the sum   a sequence in parts, before a layer divided by columns
    added     own part of the sum  all parts             a sequence in parts, after a layer divided by rows

All lines run the same program, so they exchange in the same order: autograd runs what is ready by the order in which
the forward created it. A recomputed forward exchanges again, on all lines at the same action. Every wait is bounded.
While a model is traced, its tensors have no data, and nothing is exchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.core.errors import ModelError
from drumline.model.layers.routing import is_traced

AXIS = "tp"


def own_part(axes: Axes, tensor: Tensor, dim: int) -> Tensor:
    """Return this line's part of a tensor along a dimension."""
    length, size = tensor.shape[dim], axes.size(AXIS)
    if length % size:
        raise ModelError(
            f"a tensor of shape {tuple(tensor.shape)} is divided by {size} (tp) along dimension {dim}",
            expected=f"a multiple of {size} there",
            fix="use rows of another length, or sequence_parallel=False" if dim == 1 else "choose another size of tp",
        )
    return tensor.narrow(dim, axes.place(AXIS) * (length // size), length // size)


def all_parts(axes: Axes, tensor: Tensor, dim: int) -> Tensor:
    """Return the parts of all lines, joined along a dimension."""
    parts = [tensor] * axes.size(AXIS) if is_traced(tensor) else axes.gathered(tensor, AXIS)
    return torch.cat(parts, dim)


def part_of_sum(axes: Axes, tensor: Tensor, dim: int) -> Tensor:
    """Return this line's part of the sum of all lines' tensors, along a dimension."""
    own = own_part(axes, tensor, dim)
    if is_traced(tensor):
        return own
    return axes.scattered([one.contiguous() for one in tensor.chunk(axes.size(AXIS), dim)], AXIS)


def sum_of(axes: Axes, tensor: Tensor) -> Tensor:
    """Return the sum of all lines' tensors."""
    return tensor if is_traced(tensor) else axes.summed(tensor, AXIS)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axes: Axes) -> Tensor:
        ctx.axes = axes
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return sum_of(ctx.axes, gradient), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axes: Axes) -> Tensor:
        return sum_of(axes, tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Along(torch.autograd.Function):
    """Exchanges along a dimension: `there` in the forward, `back` in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axes: Axes, dim: int, there: Any, back: Any) -> Tensor:
        ctx.given = axes, dim, back
        made: Tensor = there(axes, tensor, dim)
        # A part must not share memory with the whole: a forward may change it in place.
        return made.clone(memory_format=torch.contiguous_format) if there is own_part else made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        axes, dim, back = ctx.given
        return back(axes, gradient, dim).contiguous(), None, None, None, None


def copied(tensor: Tensor, axes: Axes) -> Tensor:
    """Return the tensor; its gradient is the sum of all lines'."""
    made: Tensor = _Copied.apply(tensor, axes)  # type: ignore[no-untyped-call]
    return made


def summed(tensor: Tensor, axes: Axes) -> Tensor:
    """Return the sum of all lines' tensors; its gradient is each one's."""
    made: Tensor = _Summed.apply(tensor, axes)  # type: ignore[no-untyped-call]
    return made


def gathered(tensor: Tensor, axes: Axes, dim: int) -> Tensor:
    """Return all parts; all lines do the same with them, so each keeps its own part of the gradient."""
    return _along(tensor, axes, dim, all_parts, own_part)


def split(tensor: Tensor, axes: Axes, dim: int) -> Tensor:
    """Return the own part of a whole tensor, whose gradient has all parts."""
    return _along(tensor, axes, dim, own_part, all_parts)


def spread(tensor: Tensor, axes: Axes, dim: int) -> Tensor:
    """Return all parts; the lines do different things with them, so their gradients are added up."""
    return _along(tensor, axes, dim, all_parts, part_of_sum)


def added(tensor: Tensor, axes: Axes, dim: int) -> Tensor:
    """Return the own part of the sum of all lines' tensors."""
    return _along(tensor, axes, dim, part_of_sum, all_parts)


def _along(tensor: Tensor, axes: Axes, dim: int, there: Any, back: Any) -> Tensor:
    made: Tensor = _Along.apply(tensor, axes, dim, there, back)  # type: ignore[no-untyped-call]
    return made
