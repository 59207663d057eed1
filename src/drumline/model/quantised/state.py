"""Packed weights in states: what a file stores of them, and how a module takes a state in.

bitsandbytes lists the parts of a weight in a state beside it. torchao's weights are one entry in a state; files, which
hold plain tensors alone, have an entry for every part, under the names of torchao's own files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drumline.model.quantised.loading import packed_value, stored_names
from drumline.model.quantised.packed import is_packed, like, parts_of, settle


def file_names(name: str, tensor: Tensor) -> list[str]:
    """Return the names of a state's tensor in a file: of its parts, or its own.

    >>> file_names("0.weight", torch.ones(1))
    ['0.weight']
    """
    return stored_names(tensor, name) if is_traceable_wrapper_subclass(tensor) else [name]


def is_text(name: str) -> bool:
    """Whether an entry of a state is text of bitsandbytes as bytes, whose length may differ.

    >>> is_text("0.weight.quant_state.bitsandbytes__nf4"), is_text("0.weight")
    (True, False)
    """
    return ".quant_state.bitsandbytes__" in name


def flattened(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a state as plain tensors.

    >>> flattened({"a": torch.ones(1)})
    {'a': tensor([1.])}
    """
    table: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parts = parts_of(tensor).values() if is_traceable_wrapper_subclass(tensor) else [tensor]
        table.update(zip(file_names(name, tensor), (part.detach().as_subclass(Tensor) for part in parts), strict=True))
    return table


def joined(state: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor | None:
    """Return a packed tensor of a flattened state, made like another; None if the state has not all of its parts."""
    names = file_names(name, tensor)
    if name in names or not all(text in state for text in names):
        return None
    return like(tensor, dict(zip(parts_of(tensor), (state[text] for text in names), strict=True)))


def is_same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have equal values, part by part.

    >>> is_same(torch.ones(2), torch.ones(2)), is_same(torch.ones(2), torch.ones(3))
    (True, False)
    """
    parts, others = parts_of(tensor), parts_of(other)
    return parts.keys() == others.keys() and all(
        part.shape == others[name].shape and torch.equal(part, others[name]) for name, part in parts.items()
    )


@torch.no_grad()
def copy_value(tensor: Tensor, value: Tensor) -> None:
    """Copy a value into a tensor's own memory, part by part."""
    others = parts_of(value)
    for name, part in parts_of(tensor).items():
        part.copy_(others[name])


def load_value(tensor: Tensor, name: str, state: Mapping[str, Any]) -> None:
    """Give a packed tensor its value in a state, which has it or its parts."""
    value = state.get(name)
    if not (isinstance(value, Tensor) and is_traceable_wrapper_subclass(value)):
        value = packed_value(tensor, name, state, state.__getitem__, tensor.device)
    if value is not tensor:
        copy_value(tensor, value)


def load_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a state as `load_state_dict` does, and packed weights by their parts: bitsandbytes cannot read its own."""
    settle(module.modules())
    rest = dict(state)
    for name, tensor in module.named_parameters(remove_duplicate=False):
        if is_packed(tensor):
            if state.get(name) is not tensor:
                load_value(tensor, name, state)
            for text in stored_names(tensor, name):
                rest.pop(text, None)
            rest[name] = tensor
    module.load_state_dict(rest)
