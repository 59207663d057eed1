"""Context parallelism: each line of an axis holds a part of every sequence, and attends to all of it.

    tokens    0 1 2 3 4 5 6 7        cp 0: 0 1 2 3        cp 1: 4 5 6 7

Everything but attention works token by token. Before attention, keys and values of all parts are gathered; their
gradients are summed over the parts and given back. A causal mask is shifted to the part's own positions. Attention is
found by its call: `torch.nn.functional.scaled_dot_product_attention` inside a stage's blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from drumline.core.errors import BatchError, ModelError
from drumline.runtime.axes.axes import Axes
from drumline.runtime.microbatches import Microbatches, has_microbatches
from drumline.runtime.values import mapped, pack

AXIS = "cp"
_POSITIONS = ("position_ids", "positions")  # what models call the argument with each token's position


class _Gathered(torch.autograd.Function):
    """The parts of all lines, one after the other along a dimension; the gradient of a part is summed over lines."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, axes: Axes, dim: int) -> Tensor:
        ctx.axes, ctx.dim = axes, dim
        return torch.cat(axes.gathered(part, AXIS), dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        axes: Axes = ctx.axes
        total = axes.summed(gradient.contiguous(), AXIS)
        return total.chunk(axes.size(AXIS), ctx.dim)[axes.place(AXIS)].contiguous(), None, None


class WholeContext(TorchFunctionMode):
    """Gathers keys and values where attention is called inside."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self._axes = axes
        self._masks: dict[tuple[int, int, torch.device], Tensor] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run a call; attention sees the whole sequence."""
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        return self._attended(*args, **(kwargs or {}))

    def _attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Tensor:
        if attn_mask is not None:
            raise ModelError(
                "attention gets a mask, and cp divides its sequence",
                expected="is_causal=True, or no mask: masks are made for a part of the sequence only",
                fix="leave out padding masks and packed documents, or use cp=1",
            )
        if query.shape[-2] != key.shape[-2]:
            raise ModelError(
                f"attention gets {query.shape[-2]} queries and {key.shape[-2]} keys, and cp divides its sequence",
                expected="attention of a sequence to itself",
                fix="use cp=1 for models with cross attention or a cache",
            )
        if key.shape == value.shape:
            keys, values = self._whole(torch.stack([key, value]))
        else:
            keys, values = self._whole(key), self._whole(value)
        mask = self._mask(query, keys.shape[-2]) if is_causal else None
        return nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, dropout_p=dropout_p, **more
        )

    def _whole(self, part: Tensor) -> Tensor:
        if _is_traced(part):  # only shapes count
            return torch.cat([part] * self._axes.size(AXIS), -2)
        made: Tensor = _Gathered.apply(part, self._axes, -2)  # type: ignore[no-untyped-call]
        return made

    def _mask(self, query: Tensor, whole: int) -> Tensor:
        """Return which keys each query of this part may see: those up to its own position."""
        length = query.shape[-2]
        key = (length, whole, query.device)
        if key in self._masks and not _is_traced(query):
            return self._masks[key]
        mask = torch.ones(length, whole, dtype=torch.bool, device=query.device).tril(length * self._axes.place(AXIS))
        if not _is_traced(query):
            self._masks = {key: mask}
        return mask


def _is_traced(tensor: Tensor) -> bool:
    """Whether a tensor has no data, because the model is being traced."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def own_part(values: Any, lengths: Collection[int], axes: Axes) -> Any:
    """Return this line's part of every tensor whose second dimension is a sequence of one of these lengths."""
    size, place = axes.size(AXIS), axes.place(AXIS)

    def part(one: Tensor) -> Tensor:
        return one.chunk(size, 1)[place] if one.dim() > 1 and one.shape[1] in lengths else one

    return mapped(values, part)


def positions_of(model: object) -> tuple[str, int]:
    """Return the argument by which a model takes each token's position, and its place; refuse a model without one.

    A model that counts positions by itself would begin at 0 in every part.

    >>> positions_of(nn.Linear(2, 2))
    Traceback (most recent call last):
    drumline.core.errors.ModelError: Linear takes no position_ids or positions, and cp divides its sequences; ...
    """
    takes = list(inspect.signature(model.forward).parameters) if isinstance(model, nn.Module) else []
    for name in _POSITIONS:
        if name in takes:
            return name, takes.index(name)
    raise ModelError(
        f"{type(model).__name__} takes no {' or '.join(_POSITIONS)}, and cp divides its sequences",
        expected="a model whose forward takes the position of each token, since a part does not begin at 0",
        fix="give its forward an argument `positions` of the shape (rows, length), and use that",
    )


def placed(
    args: tuple[Any, ...], named: dict[str, Any], target: Any, positions: tuple[str, int], axes: Axes
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a step's arguments with the positions of all tokens, unless they are given."""
    batch = _sequences(*args, *named.values())
    for one in batch or _sequences(target):
        if one.shape[1] % axes.size(AXIS):
            raise BatchError(
                f"sequences of {one.shape[1]} tokens are divided over cp = {axes.size(AXIS)}",
                expected="a multiple of it",
                fix="pad the sequences, or choose another size of cp",
            )
    name, place = positions
    if not batch or named.get(name) is not None or place < len(args):  # ranks without the first stage may have no batch
        return args, named, target
    every = [torch.arange(one.shape[1], device=one.device)[None].expand(one.shape[0], -1) for one in batch]
    is_apart = any(has_microbatches(one) for one in (*args, *named.values()))
    return args, {**named, name: Microbatches(every) if is_apart else every[0]}, target


def _sequences(*values: Any) -> list[Tensor]:
    """Return the sequences of the first value that has any: one tensor, or one of each microbatch."""
    for value in values:
        each = value if isinstance(value, Microbatches) else [value]
        found = [next((one for one in pack(part)[0] if one.dim() > 1), None) for part in each]
        if all(one is not None for one in found):
            return [one for one in found if one is not None]
    return []


def divided(
    args: tuple[Any, ...], named: dict[str, Any], target: Any, positions: tuple[str, int], axes: Axes
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a step's arguments with this line's part of every sequence, and its positions unless they are given."""
    args, named, target = placed(args, named, target, positions, axes)
    lengths = {one.shape[1] for one in _sequences(*args, *named.values()) or _sequences(target)}
    return own_part(args, lengths, axes), own_part(named, lengths, axes), own_part(target, lengths, axes)
