"""What an update changes, kept as it was before, so that the update can be undone bit for bit.

    take ── the optimizer steps ── stepped       and later, if the step must not stand:  give_back

Copies are taken, because no arithmetic undoes a rounded sum. Their memory is used again for every update.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from drumline.core.errors import RunError
from drumline.model.catalogue import Place


class KeptOptimizer:
    """The parameters, state and settings of an optimizer before its last step.

    What an optimizer keeps outside of `state` and `param_groups` is not known here.

    >>> weight = torch.nn.Parameter(torch.ones(2)); weight.grad = torch.ones(2)
    >>> optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    >>> kept_optimizer = KeptOptimizer(optimizer)
    >>> kept_optimizer.take(); optimizer.step(); kept_optimizer.stepped()
    >>> with kept_optimizer.given_back():
    ...     pass
    >>> weight.tolist(), dict(optimizer.state)
    ([1.0, 1.0], {})
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rooms: dict[Tensor, Tensor] = {}
        self._state: dict[Any, dict[str, Any]] = {}
        self._before: list[dict[str, Any]] = []
        self._after: list[dict[str, Any]] = []

    @property
    def name(self) -> str:
        """The class of the optimizer."""
        return type(self._optimizer).__name__

    @property
    def num_bytes(self) -> int:
        """The memory that the copies take."""
        return sum(room.nbytes for room in self._rooms.values())

    @torch.no_grad()
    def take(self) -> None:
        """Copy everything that a step may change."""
        optimizer = self._optimizer
        self._before = _settings(optimizer)
        self._state = {
            owner: {name: item if isinstance(item, Tensor) else copy.deepcopy(item) for name, item in entries.items()}
            for owner, entries in optimizer.state.items()
        }
        parameters = [param for group in optimizer.param_groups for param in group["params"]]
        tensors = [entry for entries in self._state.values() for entry in entries.values() if isinstance(entry, Tensor)]
        rooms = self._rooms
        self._rooms = {param: _room(param, rooms.get(param)) for param in dict.fromkeys((*parameters, *tensors))}
        _copy(list(self._rooms.values()), list(self._rooms))

    def stepped(self) -> None:
        """Look at the settings after the step, to know later which of them others have changed."""
        self._after = _settings(self._optimizer)

    @contextmanager
    def given_back(self) -> Iterator[None]:
        """Put everything back. A step inside finds all as it was; settings that others have changed since come back."""
        self._give_back()
        groups, now = self._optimizer.param_groups, _settings(self._optimizer)
        for group, before in zip(groups, self._before, strict=True):
            _set(group, before)
        yield
        for group, after, changed in zip(groups, self._after, now, strict=True):
            _set(group, {key: item for key, item in changed.items() if key not in after or not _same(item, after[key])})

    @torch.no_grad()
    def _give_back(self) -> None:
        _copy(list(self._rooms), list(self._rooms.values()))
        state = self._optimizer.state
        for owner in [tensor for tensor in state if tensor not in self._state]:
            del state[owner]
        for owner, entries in self._state.items():
            state[owner] = {
                name: entry if isinstance(entry, Tensor) else copy.deepcopy(entry) for name, entry in entries.items()
            }


class KeptBuffers:
    """The buffers that forwards change, such as running statistics, as they were before a step.

    Which ones change shows in the steps that ran: those are copied before a step that may begin again.
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = [place for place in places if not place.is_parameter]
        self._changing: set[str] = set()
        self._marks: list[tuple[Tensor | None, int]] = []
        self._copies: dict[str, Tensor] = {}

    def take(self, *, copies: bool) -> None:
        """Look at all buffers, and copy those that steps change."""
        self._marks = [(place.tensor, _version(place.tensor)) for place in self._places]
        changing = [place for place in self._places if copies and place.name in self._changing]
        self._copies = {place.name: place.tensor.detach().clone() for place in changing if place.tensor is not None}

    def learn(self) -> None:
        """Note which buffers the step has changed."""
        self._changing.update(place.name for place, *_ in self._changed())

    @torch.no_grad()
    def give_back(self) -> None:
        """Restore what the step has changed."""
        for place, tensor, version in self._changed():
            if tensor is not None and _version(tensor) != version:
                if place.name not in self._copies:
                    raise RunError(
                        f"the update before this step was wrong, and {place.name} has changed in this step for the "
                        "first time, so the step cannot begin again",
                        expected="a buffer that changes in every step, or in none",
                        fix='use validated="before"',
                    )
                tensor.copy_(self._copies[place.name])
            place.table[place.key] = tensor
        self._copies = {}

    def _changed(self) -> Iterator[tuple[Place, Tensor | None, int]]:
        for place, (tensor, version) in zip(self._places, self._marks, strict=True):
            if place.tensor is not tensor or _version(tensor) != version:
                yield place, tensor, version


def _version(tensor: Tensor | None) -> int:
    return 0 if tensor is None or tensor.is_inference() else tensor._version


def _room(tensor: Tensor, room: Tensor | None) -> Tensor:
    """Return memory for a copy of a tensor: that of the last copy if it fits."""
    if room is not None and (room.shape, room.dtype, room.device) == (tensor.shape, tensor.dtype, tensor.device):
        return room
    return torch.empty_like(tensor, requires_grad=False)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of all groups, which a step or a scheduler may change."""
    return [
        {
            key: tensor.detach().clone() if isinstance(tensor, Tensor) else copy.deepcopy(tensor)
            for key, tensor in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


def _set(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, setting in settings.items():
        now = group.get(key)
        if isinstance(now, Tensor) and isinstance(setting, Tensor):
            now.copy_(setting)
        elif not _same(now, setting):
            group[key] = setting


def _same(tensor: Any, other: Any) -> bool:
    if isinstance(tensor, Tensor) or isinstance(other, Tensor):
        return isinstance(tensor, Tensor) and isinstance(other, Tensor) and torch.equal(tensor, other)
    return bool(tensor == other)
