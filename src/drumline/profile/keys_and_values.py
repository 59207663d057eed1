"""The bytes of keys and values that attention gets in a block, of which slices of sequences hold gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from drumline.model.block import Block
from drumline.model.precision import Precision
from drumline.model.randomness import Randomness
from drumline.model.values import pack
from drumline.profile.blocks import left_as_it_was
from drumline.runtime.stage import Stage


def keys_and_values(blocks: Sequence[Block], microbatch: Any, *, precision: Precision | None = None) -> dict[str, int]:
    """Run a microbatch through the blocks, and return what keys and values take in each, by its name.

    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x): return functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    >>> keys_and_values([Block("attention", Attention())], torch.ones(1, 2, 6, 8))
    {'attention': 768}
    """
    device = next((tensor.device for tensor in pack(microbatch)[0]), torch.device("cpu"))
    randomness, sizes, value = Randomness(0, device), dict[str, int](), microbatch
    with left_as_it_was(blocks, randomness):
        for index, block in enumerate(blocks):
            stage = Stage(index, [block], randomness, precision=precision)
            stage.begin()
            with AttentionCalls() as calls:
                value = stage.forward(0, value)
            sizes[block.name] = calls.num_bytes
    return sizes


class AttentionCalls(TorchFunctionMode):
    """Counts the bytes of keys and values that attention gets inside of `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            self.num_bytes += sum(named[name].nbytes for name in ("key", "value") if isinstance(named[name], Tensor))
        return function(*args, **(kwargs or {}))
