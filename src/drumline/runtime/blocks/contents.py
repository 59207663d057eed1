"""What is inside of a value that a model hands on: tensors with the way to each, and objects that may not travel."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from drumline.core.errors import ModelError
from drumline.runtime.blocks.graph import Path
from drumline.runtime.values import plain_in

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type(...), type, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo,
)  # fmt: skip


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor inside."""
    return [one for _, one in found_in(value)]


def found_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor inside, with the way to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, one in value.items():
            yield from found_in(one, (*path, ("item", key)))
    elif isinstance(value, tuple | list):
        for at, one in enumerate(value):
            yield from found_in(one, (*path, ("item", at)))
    elif isinstance(value, slice):
        for name in ("start", "stop", "step"):
            yield from found_in(getattr(value, name), (*path, ("field", name)))
    elif is_dataclass(value) and not isinstance(value, type):
        for one in fields(value):
            yield from found_in(getattr(value, one.name, None), (*path, ("field", one.name)))


def refuse_objects(form: Any, what: str) -> None:
    """Refuse plain objects that can change: they would be shared by all microbatches and stay on this rank."""
    for one in plain_in(form):
        if not isinstance(one, _PLAIN) and not callable(one):
            raise ModelError(
                f"{what} gets or returns a {type(one).__name__}",
                expected="tensors, plain values, and tuples, lists, dicts or dataclasses of these",
                fix="pass what is inside of it instead",
            )


def refuse_fake(value: Any) -> None:
    """Refuse a constant that is a stand-in, or a function or module that holds one: it would have no numbers."""
    inside = [value]
    if isinstance(value, functools.partial):
        inside += [value.func, *value.args, *value.keywords.values()]
    for one in list(inside):
        inside += [cell.cell_contents for cell in getattr(one, "__closure__", None) or () if _is_filled(cell)]
        inside += [*(getattr(one, "__defaults__", None) or ()), getattr(one, "__self__", None)]
    for one in inside:
        held = [*one.parameters(), *one.buffers()] if isinstance(one, nn.Module) else tensors_in(one)
        if any(isinstance(tensor, FakeTensor) for tensor in held):
            raise ModelError(
                f"the model's forward hands a {type(value).__name__} with tensors of the model inside to a function "
                "between its blocks",
                expected="tensors and plain values as arguments, between blocks",
                fix="move the call into a block",
            )


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False
