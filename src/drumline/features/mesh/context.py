"""Context parallelism: each line of an axis holds a part of every sequence, and attends to all of it.

    tokens    0 1 2 3 4 5 6 7        cp 0: 0 1 2 3        cp 1: 4 5 6 7

Everything but attention works token by token. Before attention, keys and values of all parts are gathered; their
gradients are summed over the parts and given back. A causal mask is shifted to the part's own positions. Attention is
found by its call: `torch.nn.functional.scaled_dot_product_attention` inside a stage's blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from drumline.channel.lines.axes import Axes
from drumline.core.errors import ModelError
from drumline.features.mesh.passing import spread
from drumline.model.layers.routing import is_traced
from drumline.runtime.sequences import without_packing

AXIS = "cp"


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
                expected="is_causal=True, or no mask: masks are made for only a part of the sequence",
                fix="leave out padding masks, packed documents and windows shorter than the sequence, or use cp=1",
            )
        if query.shape[-2] != key.shape[-2]:
            raise ModelError(
                f"attention gets {query.shape[-2]} queries and {key.shape[-2]} keys, and cp divides its sequence",
                expected="attention of a sequence to itself",
                fix="use cp=1 for models with cross attention or a cache",
            )
        if key.shape == value.shape:
            keys, values = spread(torch.stack([key, value]), self._axes, -2, AXIS)
        else:
            keys, values = (spread(tensor, self._axes, -2, AXIS) for tensor in (key, value))
        mask = self._mask(query, keys.shape[-2]) if is_causal else None
        return nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=mask, dropout_p=dropout_p, **more
        )

    def _mask(self, query: Tensor, whole: int) -> Tensor:
        """Return which keys each query of this part may see: those up to its own position."""
        length = query.shape[-2]
        key = (length, whole, query.device)
        if key in self._masks and not is_traced(query):
            return self._masks[key]
        mask = torch.ones(length, whole, dtype=torch.bool, device=query.device).tril(length * self._axes.place(AXIS))
        if not is_traced(query):
            self._masks = {key: mask}
        return mask


def whole_context(axes: Axes) -> AbstractContextManager[None]:
    """Return what gathers keys and values inside, if the lines of a mesh divide sequences."""
    return nullcontext() if axes.size(AXIS) == 1 else _gathering(axes)


@contextmanager
def _gathering(axes: Axes) -> Iterator[None]:
    """Gather keys and values inside; positions that mean packed documents are refused before (`placed`)."""
    with WholeContext(axes), without_packing():
        yield
