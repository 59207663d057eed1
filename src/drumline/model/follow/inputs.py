"""The arguments of a model, and their kind, on which a graph of its forward depends.

Arguments on whose values a forward branches, such as the sizes of pictures, are part of the kind.

So the model is traced again for other values.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drumline.model.follow.skeleton import Meta
from drumline.model.patches import Patch, Replacement
from drumline.model.values import pack, plain_in


class Numbers:
    """A small tensor identified by its values.

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


class Inputs(NamedTuple):
    """The arguments of the model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def packed(self, baked: Collection[str | int]) -> Inputs:
        """Return the arguments with those in `baked` as `Numbers`."""

        def known(name: str | int, value: Any) -> Any:
            return Numbers(value) if name in baked and isinstance(value, Tensor) else value

        return self.each(known) if baked else self

    def unpacked(self, device: torch.device) -> Inputs:
        """Return the arguments with tensors instead of `Numbers`."""
        return self.each(lambda _, value: value.tensor.to(device) if isinstance(value, Numbers) else value)

    def each(self, function: Callable[[str | int, Any], Any]) -> Inputs:
        """Apply a function to every argument, with its name or position, and return the results."""
        args = tuple(function(at, value) for at, value in enumerate(self.args))
        return Inputs(args, {name: function(name, value) for name, value in self.kwargs.items()})


class InputKind(NamedTuple):
    """What a graph depends on: the structure of the inputs, their shapes and dtypes, and the mode."""

    form: Any
    metas: tuple[Meta, ...]  # of the input tensors, without requires_grad
    train: bool
    autocast: torch.dtype | None = None
    types: str = ""  # of the plain values: 1, 1.0 and True are equal but not the same
    decided: tuple[int | bool, ...] = ()  # what the forward read of integer inputs, in order

    @classmethod
    def of(cls, inputs: Inputs, device: torch.device, *, train: bool) -> tuple[InputKind, tuple[Tensor, ...]]:
        """Return the kind of some inputs under the current settings, and the tensors in them.

        >>> value, other = (InputKind.of(Inputs((), {"n": n}), torch.device("cpu"), train=True)[0] for n in (1, 1.0))
        >>> value == other
        False
        """
        tensors, form = pack((inputs.args, inputs.kwargs))
        metas = tuple(Meta(part.shape, part.dtype, None if part.is_contiguous() else part.stride()) for part in tensors)
        autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
        types = " ".join(type(value).__name__ for value in plain_in(form))
        return cls(form, metas, train, autocast, types), tensors


_FEW = 4096  # most values of an argument on which a forward may branch


def names_of(inputs: Inputs, baked: Collection[str | int], places: Sequence[int]) -> frozenset[str | int]:
    """Return the arguments that are the tensors at these positions; none unless all hold a few integers."""
    tensors = pack(inputs.packed(baked))[0]
    wanted = {id(tensors[place]) for place in places}
    arguments: tuple[tuple[str | int, Any], ...] = (*enumerate(inputs.args), *inputs.kwargs.items())
    names = {name: value for name, value in arguments if id(value) in wanted}
    if len(names) < len(places) or any(value.is_floating_point() or value.numel() > _FEW for value in names.values()):
        return frozenset()
    return frozenset(names)


def unchecked() -> AbstractContextManager[None]:
    """Assume that conditions on the values of stand-ins hold: they only guard against wrong inputs."""
    return _checks.by(True)


def _checking(replaced: Replacement) -> Any:
    def checked(kind: Any, cond: Any, message: Any = None) -> None:
        if replaced.watcher is None or not isinstance(cond, FakeTensor):
            replaced.original(kind, cond, message)

    return checked


_checks = Patch(torch, "_check_tensor_all_with", _checking)
