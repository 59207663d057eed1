"""What lines exchange in the middle of a forward and its backward: tensor-parallel layers, and attention over cp.

    forward               backward
    copied    as it is             sum over tp           before a layer divided by columns
    summed    sum over tp          as it is              after a layer divided by rows
    gathered  all parts            own part              the whole output of a layer divided by columns
    split     own part             all parts             the own part of a whole input
    spread    all parts            own part of the sum   a sequence in parts, before attention or columns
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


def own_part(axes: Axes, tensor: Tensor, dim: int, axis: str = AXIS) -> Tensor:
    """Return this line's part of a tensor along a dimension."""
    length, size = tensor.shape[dim], axes.size(axis)
    if length % size:
        raise ModelError(
            f"a tensor of shape {tuple(tensor.shape)} is divided by {size} ({axis}) along dimension {dim}",
            expected=f"a multiple of {size} there",
            fix="use rows of another length, or sequence_parallel=False" if dim == 1 else f"choose another {axis}",
        )
    return tensor.narrow(dim, axes.place(axis) * (length // size), length // size)


def _all_parts(axes: Axes, tensor: Tensor, dim: int, axis: str) -> Tensor:
    """Return the parts of all lines, joined along a dimension."""
    parts = [tensor] * axes.size(axis) if is_traced(tensor) else axes.gathered(tensor, axis)
    return torch.cat(parts, dim)


def _part_of_sum(axes: Axes, tensor: Tensor, dim: int, axis: str) -> Tensor:
    """Return this line's part of the sum of all lines' tensors, along a dimension."""
    own_tensor = own_part(axes, tensor, dim, axis)
    if is_traced(tensor):
        return own_tensor
    return axes.scattered([value.contiguous() for value in tensor.chunk(axes.size(axis), dim)], axis)


def _sum_of(axes: Axes, tensor: Tensor, dim: int, axis: str) -> Tensor:
    """Return the sum of all lines' tensors."""
    return tensor if is_traced(tensor) else axes.summed(tensor, axis)


def _as_it_is(axes: Axes, tensor: Tensor, dim: int, axis: str) -> Tensor:
    return tensor.view_as(tensor)


class _Passed(torch.autograd.Function):
    """An exchange: `there` in the forward, `back` in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, axes: Axes, dim: int, axis: str, there: Any, back: Any) -> Tensor:
        ctx.arguments = axes, dim, axis, back
        result: Tensor = there(axes, tensor, dim, axis)
        # A part must not share memory with the whole: a forward may change it in place.
        return result.clone(memory_format=torch.contiguous_format) if there is own_part else result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        axes, dim, axis, back = ctx.arguments
        result = back(axes, gradient, dim, axis)
        return result.contiguous() if back is own_part else result, None, None, None, None, None


def copied(tensor: Tensor, axes: Axes) -> Tensor:
    """Return the tensor; its gradient is the sum of all lines'."""
    return _passed(tensor, axes, 0, _as_it_is, _sum_of)


def summed(tensor: Tensor, axes: Axes) -> Tensor:
    """Return the sum of all lines' tensors; its gradient is each one's."""
    return _passed(tensor, axes, 0, _sum_of, _as_it_is)


def gathered(tensor: Tensor, axes: Axes, dim: int) -> Tensor:
    """Return all parts; all lines do the same with them, so each keeps its own part of the gradient."""
    return _passed(tensor, axes, dim, _all_parts, own_part)


def split(tensor: Tensor, axes: Axes, dim: int) -> Tensor:
    """Return the own part of a whole tensor, whose gradient has all parts."""
    return _passed(tensor, axes, dim, own_part, _all_parts)


def spread(tensor: Tensor, axes: Axes, dim: int, axis: str = AXIS) -> Tensor:
    """Return all parts; the lines do different things with them, so their gradients are added up."""
    return _passed(tensor, axes, dim, _all_parts, _part_of_sum, axis)


def added(tensor: Tensor, axes: Axes, dim: int) -> Tensor:
    """Return the own part of the sum of all lines' tensors."""
    return _passed(tensor, axes, dim, _part_of_sum, _all_parts)


def _passed(tensor: Tensor, axes: Axes, dim: int, there: Any, back: Any, axis: str = AXIS) -> Tensor:
    result: Tensor = _Passed.apply(tensor, axes, dim, axis, there, back)  # type: ignore[no-untyped-call]
    return result
