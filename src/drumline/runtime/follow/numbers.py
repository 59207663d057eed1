"""Arguments by whose numbers a model's forward decides, such as the sizes of pictures: taken as they are.

They are part of what a graph depends on: other numbers are followed anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drumline.runtime.patches import Patch, Replaced
from drumline.runtime.values import pack


class Numbers:
    """A small tensor that is known by its numbers.

    >>> Numbers(torch.tensor([1, 2])) == Numbers(torch.tensor([1, 2])), Numbers(torch.tensor([1, 2]))
    (True, Numbers([1, 2]))
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().cpu()
        self._key = (str(tensor.dtype), tuple(tensor.shape), tuple(self.tensor.flatten().tolist()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Numbers) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"Numbers({self.tensor.tolist()})"


def packed(inputs: Any, baked: Collection[str | int]) -> tuple[Any, Any]:
    """Return a model's arguments with those `baked` as `Numbers`."""
    args, kwargs = inputs.args, inputs.kwargs
    if not baked:
        return args, kwargs

    def known(name: str | int, value: Any) -> Any:
        return Numbers(value) if name in baked and isinstance(value, Tensor) else value

    named = {name: known(name, kwargs[name]) for name in kwargs}
    return tuple(known(at, value) for at, value in enumerate(args)), named


def unpacked(inputs: tuple[Any, Any], device: torch.device) -> tuple[Any, Any]:
    """Return arguments with the tensors back in the places of `Numbers`."""
    args, kwargs = inputs

    def back(value: Any) -> Any:
        return value.tensor.to(device) if isinstance(value, Numbers) else value

    return tuple(back(value) for value in args), {name: back(value) for name, value in kwargs.items()}


def names_of(inputs: Any, baked: Collection[str | int], places: Sequence[int], *, at_most: int) -> frozenset[str | int]:
    """Return the arguments that are the tensors at these places; none unless all are whole numbers, and not many."""
    tensors = pack(packed(inputs, baked))[0]
    wanted = {id(tensors[place]) for place in places}
    given = (*enumerate(inputs.args), *inputs.kwargs.items())
    found = {name: value for name, value in given if id(value) in wanted}
    if len(found) < len(places) or any(one.is_floating_point() or one.numel() > at_most for one in found.values()):
        return frozenset()
    return frozenset(found)


def unchecked() -> AbstractContextManager[None]:
    """Take conditions on the numbers in stand-ins for granted: they only guard against wrong inputs."""
    return _checks.by(True)


def _checking(replaced: Replaced) -> Any:
    def checked(kind: Any, cond: Any, message: Any = None) -> None:
        if replaced.watcher is None or not isinstance(cond, FakeTensor):
            replaced.found(kind, cond, message)

    return checked


_checks = Patch(torch, "_check_tensor_all_with", _checking)
