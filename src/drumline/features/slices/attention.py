"""Attention of a slice to its own and all earlier keys and values of its sequence, and the gradients of these.

    forward     slice 0 ──► keys, values kept      slice 1 ──► attends to slices 0, 1      slice 2 ──► to 0, 1, 2
    backward    slice 2 ──► gradients of all keys and values before it are added up
                slice 1 ──► its own gradients and those that slice 2 left for it, and so on

Slices go forward in order and backward in reverse, so sums have one order: from the last slice to the first. Every
slice has its own graph, so a stage keeps and frees slices as it does microbatches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drumline.features.slices.kernels import Attended, kernel_for


class SliceMemory:
    """What one call of attention keeps of one sequence: keys and values by slice, and gradients that are owed."""

    __slots__ = ("keys", "owed", "values")

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.owed: tuple[Tensor, Tensor] | None = None  # by later slices, to the slices before them

    def take(self, number: int, key: Tensor, value: Tensor) -> None:
        """Keep a slice's keys and values; a recomputed forward brings the same again."""
        self.keys[number], self.values[number] = key, value

    def tensors(self) -> list[Tensor]:
        """Return all that it keeps."""
        return [*self.keys.values(), *self.values.values(), *(self.owed or ())]

    def until(self, number: int) -> tuple[Tensor, Tensor]:
        """Return all keys and values up to a slice's own."""
        keys, values = ([by_slice[at] for at in range(number + 1)] for by_slice in (self.keys, self.values))
        return (keys[0], values[0]) if number == 0 else (torch.cat(keys, -2), torch.cat(values, -2))

    def settle(self, number: int, of_keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of a slice's own keys and values, and owe the rest to the slices before it."""
        start = of_keys.shape[-2] - self.keys[number].shape[-2]
        pair = (of_keys, of_values)
        if self.owed is not None:
            for total, part in zip(self.owed, pair, strict=True):
                total[..., : part.shape[-2], :].add_(part)
            pair = self.owed
        parts = [total[..., start : start + self.keys[number].shape[-2], :] for total in pair]
        self.owed = (pair[0], pair[1]) if number else None
        self.keys.pop(number), self.values.pop(number)
        # Copies where others are still owed: a view would keep all of the sum.
        parts = [part.clone() for part in parts] if number else parts
        return parts[0], parts[1]


class _OfSlice(torch.autograd.Function):
    """Attention of one slice."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, memory: SliceMemory, number: int, scale: float, noise: Any
    ) -> Tensor:
        memory.take(number, key.detach(), value.detach())
        kernel = kernel_for(query, key, value, has_noise=noise is not None)
        result = kernel.forward(query, *memory.until(number), scale, noise)
        ctx.save_for_backward(query, key, value, result.out, result.lse, noise, *result.more)
        ctx.kernel, ctx.memory, ctx.number, ctx.scale = kernel, memory, number, scale
        return result.out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        query, _, _, out, lse, noise, *more = ctx.saved_tensors
        keys, values = ctx.memory.until(ctx.number)
        result = Attended(out, lse, tuple(more))
        of_query, of_keys, of_values = ctx.kernel.backward(gradients[0], query, keys, values, result, ctx.scale, noise)
        return of_query, *ctx.memory.settle(ctx.number, of_keys, of_values), None, None, None, None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: SliceMemory,
    number: int,
    *,
    scale: float | None = None,
    noise: Tensor | None = None,
) -> Tensor:
    """Return causal attention of a slice's queries to keys and values of its own and of all slices before it.

    `number` counts the slices of the sequence; `noise` multiplies the weights of all keys up to the slice's own.

    >>> whole = torch.nn.functional.scaled_dot_product_attention
    >>> _ = torch.manual_seed(0)
    >>> q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64).unbind()
    >>> memory = SliceMemory()
    >>> parts = [torch.split(tensor, [3, 1, 2], dim=-2) for tensor in (q, k, v)]
    >>> out = [attend(*slices, memory, number) for number, slices in enumerate(zip(*parts))]
    >>> torch.allclose(torch.cat(out, -2), whole(q, k, v, is_causal=True))
    True
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if (missing := 4 - query.dim()) > 0:  # kernels take rows and heads
        query, key, value = (tensor[(None,) * missing] for tensor in (query, key, value))
        noise = None if noise is None else noise[(None,) * missing]
    result: Tensor = _OfSlice.apply(query, key, value, memory, number, scale, noise)  # type: ignore[no-untyped-call]
    return result[(0,) * missing] if missing > 0 else result
