"""Layers of bitsandbytes in a copy of a model that only shows shapes: they compute on plain weights there.

Their own code needs codes and scales, which such a copy does not have. torchao's weights need nothing of this: the copy
has a plain tensor of the same shape for each.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drumline.model.quantised.packed import is_packed, unpacked_shape


def sketch(original: nn.Module, copied: nn.Module) -> None:
    """Let the copy of a quantised layer return what the original does, as far as shapes and gradients go."""
    weight = original._parameters.get("weight")
    if not isinstance(original, nn.Linear) or weight is None or is_traceable_wrapper_subclass(weight):
        return
    if is_packed(weight):
        vars(copied)["forward"] = partial(_product, copied, unpacked_shape(weight))


def _product(layer: nn.Module, shape: torch.Size, x: Tensor) -> Tensor:
    bias = layer._parameters.get("bias")
    return nn.functional.linear(x, x.new_empty(shape), None if bias is None else bias.to(x.dtype))
