"""What is inside of a value that a model hands on: tensors with the way to each, and objects that may not travel."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.runtime.graph import Path
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
