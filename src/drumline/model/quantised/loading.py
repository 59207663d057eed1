"""Values of packed weights from files: of full precision, packed as they are read, or quantised already.

A rank never holds more than one weight in full precision. Files that are quantised already have these names:

    bitsandbytes, 4 bits   weight, weight.absmax, weight.quant_map, ..., weight.quant_state.bitsandbytes__nf4
    bitsandbytes, 8 bits   weight, SCB, weight_format
    torchao                _weight_qdata, _weight_scale, ...
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.quantised.bases import recipe_in
from drumline.model.quantised.packed import is_packed, like, parts_of, unpacked_shape

Read = Callable[[str], Tensor]


def stored_names(tensor: Tensor, name: str) -> list[str]:
    """Return the names that files may have for the parts of a packed tensor, besides its own name.

    >>> stored_names(torch.ones(1), "0.weight")
    []
    """
    if not is_packed(tensor):
        return []
    library: Any = sys.modules.get("bitsandbytes")
    above, _, key = name.rpartition(".")
    start = f"{above}." if above else ""
    if library is not None and isinstance(tensor, library.nn.Params4bit):
        tables = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
        return [f"{name}.{table}" for table in (*tables, f"quant_state.bitsandbytes__{tensor.quant_type}")]
    if library is not None and isinstance(tensor, library.nn.Int8Params):
        return [f"{start}SCB", f"{start}weight_format"]
    return [f"{start}_{key}_{part}" for part in parts_of(tensor)]


def packed_value(tensor: Tensor, name: str, known: Collection[str], read: Read, device: torch.device) -> nn.Parameter:
    """Return the value of a packed parameter; `known` are names that files have, and `read` reads one of them.

    `tensor` is what the model has under this name, which says how it is packed.
    """
    stored = [text for text in stored_names(tensor, name) if text in known]
    if name in known and (value := read(name)).is_floating_point() and not stored:
        _check_shape(tensor, name, value)
        recipe = recipe_in(tensor)
        if recipe is None:
            raise ModelError(
                f"the parameter {name} is a {type(tensor).__name__}, and nothing says how it was quantised",
                expected="a layer that dl.quantise made, or weights that are quantised already",
                fix="build the plain model on the meta device, and call dl.quantise(model, config)",
            )
        return recipe.pack(value.to(device))
    parts = {text: read(text).to(device) for text in (name, *stored) if text in known}
    parameter = _joined(tensor, name, parts, device)
    parameter.requires_grad_(False)
    return parameter


def _check_shape(tensor: Tensor, name: str, value: Tensor) -> None:
    expected = tuple(unpacked_shape(tensor))
    if tuple(value.shape) != expected:
        raise ModelError(
            f"the tensor {name!r} has shape {tuple(value.shape)}", expected=f"{expected}, the shape of {name}"
        )


def _joined(tensor: Tensor, name: str, parts: dict[str, Tensor], device: torch.device) -> nn.Parameter:
    """Return a parameter of parts that are quantised already."""
    library: Any = sys.modules.get("bitsandbytes")
    new_tensor: Any
    if library is not None and isinstance(tensor, library.nn.Params4bit):
        data = _part(parts, name, name)
        statistics = {text: part for text, part in parts.items() if text != name}
        new_tensor = type(tensor).from_prequantized(data, statistics, requires_grad=False, device=device)
    elif library is not None and isinstance(tensor, library.nn.Int8Params):
        scales = stored_names(tensor, name)[0]
        new_tensor = like(tensor, {"data": _part(parts, name, name), "SCB": _part(parts, scales, name)})
    else:
        names = dict(zip(parts_of(tensor), stored_names(tensor, name), strict=True))
        new_tensor = like(tensor, {part: _part(parts, text, name) for part, text in names.items()})
    for part, before in parts_of(tensor).items():
        now = parts_of(new_tensor)[part]
        if (now.shape, now.dtype) != (before.shape, before.dtype):
            raise ModelError(
                f"{part} of {name!r} has shape {tuple(now.shape)} and dtype {now.dtype} in the files",
                expected=f"{tuple(before.shape)} and {before.dtype}, as the model has it",
            )
    parameter: nn.Parameter = new_tensor
    return parameter


def _part(parts: dict[str, Tensor], text: str, name: str) -> Tensor:
    if text not in parts:
        expected = "all parts of a quantised weight, or the weight in full precision"
        raise ModelError(f"the files have no {text!r}, a part of {name}", expected=expected)
    return parts[text]
