"""The weight versions of one stage: a backward sees the weights that its forward saw, whatever was updated meanwhile.

    F0  F1  B0  U0  F2  B1      U0 makes version 1; B1 needs version 0, so version 1 gets memory of its own

A forward uses the newest version. What autograd keeps of a parameter for the backward is an alias: the same memory, but
its own tensor. Before an update, each parameter that changes and that some backward still needs moves to new
memory, and the alias keeps the old one. So nothing is copied that no backward needs, parameters that an update leaves
alone stay shared by all versions, and old memory is freed with the last alias of it.

A recomputed segment keeps no graph, so aliases of its parameters are kept beside it, and put in place while it runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drumline.runtime.stage import Stage
from drumline.runtime.stash import SavedTensor, Scale


class _TensorVersion(NamedTuple):
    """A tensor that autograd keeps, and how often it had been changed in place by then."""

    tensor: Tensor
    version: int


@dataclass(slots=True)
class _User:
    """What a microbatch in flight needs: a version's number, the memory of parameters, and kept aliases of them."""

    version: int
    places: set[int] = field(default_factory=set)
    aliases: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)


class Versions:
    """The versions of a stage's parameters.

    >>> from drumline.model.block import Block
    >>> from drumline.model.randomness import Randomness
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> versions = Versions(Stage(0, [Block("0", layer)], Randomness(0, torch.device("cpu"))))
    >>> with versions.forward("microbatch 0"):
    ...     y = layer(torch.ones(1, 2, requires_grad=True))
    >>> before = layer.weight.data_ptr()
    >>> versions.update([layer.weight]); layer.weight.data_ptr() == before
    False
    >>> versions.number, versions.count, versions.of("microbatch 0")
    (1, 2, 0)
    """

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.number = 0  # how many updates have made the newest version
        self.peak = 1  # most versions at once
        self.scale: Scale | None = None  # counts bytes, if given
        self._users: dict[Any, _User] = {}
        self._needed: Counter[int] = Counter()  # by address of memory, how many microbatches need it

    @property
    def count(self) -> int:
        """How many versions there are: the newest one, and older ones that a microbatch needs."""
        return len({self.number, *(user.version for user in self._users.values())})

    def of(self, microbatch: Any) -> int:
        """Return the number of the version that a microbatch in flight uses."""
        return self._users[microbatch].version

    @contextmanager
    def forward(self, microbatch: Any) -> Iterator[None]:
        """Run a forward inside: its backward will see the newest version."""
        user = self._users[microbatch] = _User(self.number)
        user.aliases = [
            (p, p.data) for segment in self.stage.segments if segment.checkpointed for p in segment.parameters
        ]
        user.places = {_place(tensor) for _, tensor in user.aliases}
        with self._keeping_versions(user.places):
            yield
        self._needed.update(user.places)

    @contextmanager
    def backward(self, microbatch: Any) -> Iterator[None]:
        """Run the backward of a microbatch inside, and let go of its version."""
        user = self._users[microbatch]
        moved = [(param, alias) for param, alias in user.aliases if _place(alias) != _place(param)]
        with _swapped(moved):
            if user.aliases:
                with self._keeping_versions(set()):  # what runs again is kept until its backward, a moment later
                    yield
            else:
                yield
        self.let_go(microbatch)

    def let_go(self, microbatch: Any) -> None:
        """Forget a microbatch: nothing of it is in flight any more."""
        self._needed.subtract(self._users.pop(microbatch).places)
        self._needed = +self._needed

    @contextmanager
    def _keeping_versions(self, places: set[int]) -> Iterator[None]:
        own_places = {_place(param) for param in self.stage.parameters}
        scale = self.scale

        def pack(tensor: Tensor) -> Any:
            place = _place(tensor)
            if place in own_places:
                places.add(place)
                tensor = tensor.data  # with a count of changes of its own
            return _TensorVersion(tensor, tensor._version) if scale is None else SavedTensor(scale, tensor)

        with torch.autograd.graph.saved_tensors_hooks(pack, _taken):
            yield

    def update(self, changing: Iterable[nn.Parameter]) -> None:
        """Begin a new version, before an optimizer changes these parameters in place."""
        torch.clear_autocast_cache()  # its casts are of the version before
        for param in changing:
            if self._needed[_place(param)]:
                param.data = param.data.clone()
        self.number += 1
        self.peak = max(self.peak, self.count)

    def clear(self) -> None:
        """Forget all microbatches in flight."""
        self._users.clear()
        self._needed.clear()


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _taken(saved: Any) -> Tensor:
    if isinstance(saved, SavedTensor):
        return saved.taken()
    if saved.tensor._version != saved.version:
        raise RuntimeError("a tensor that a backward needs has been modified by an inplace operation")
    tensor: Tensor = saved.tensor
    return tensor


@contextmanager
def _swapped(values: list[tuple[nn.Parameter, Tensor]]) -> Iterator[None]:
    """Let parameters have other values inside, and autocast no casts of those outside."""
    newest = [param.data for param, _ in values]
    for param, value in values:
        param.data = value
    if values:
        torch.clear_autocast_cache()
    try:
        yield
    finally:
        for (param, _), value in zip(values, newest, strict=True):
            param.data = value
        if values:
            torch.clear_autocast_cache()
