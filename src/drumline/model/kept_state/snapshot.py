"""What some values hold, however deep: for a run on what was there, and for going back to it.

    before a forward     a Snapshot takes what lists, objects, generators hold, and copies tensors that may change
    it runs again        put_in: the same objects hold what they held, with copies for tensors; then what they hold now

Tensors change in copies, because a graph may have saved the tensor itself. Copies share memory as the tensors do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Number
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from drumline.model.kept_state.contents import COMMON, Kind, items_of, kind_of, position_of, with_items
from drumline.model.watch.fingerprint import PLAIN
from drumline.model.watch.used_up import can_be_used_up

_PLAIN = frozenset(PLAIN)
_MOST = 4096  # items of a container that are looked into
_MOST_OBJECTS = 16384
MOST_BYTES = 2**26  # of a tensor that is copied to see whether it changes; of a larger one the version tells


class Snapshot:
    """What values hold, with copies of their tensors, of at most so many bytes each.

    >>> mine = {"seen": [1], "mean": torch.zeros(1)}
    >>> before = Snapshot([mine], most_bytes=64)
    >>> mine["seen"].append(2); mine["mean"].add_(1)
    tensor([1.])
    >>> with before.put_in():
    ...     print(mine)
    {'seen': [1], 'mean': tensor([0.])}
    >>> mine
    {'seen': [1, 2], 'mean': tensor([1.])}
    """

    def __init__(self, values: Iterable[Any], *, most_bytes: float) -> None:
        self.objects: dict[int, tuple[Any, Kind, Any]] = {}
        self.tensors: dict[int, tuple[Tensor, int]] = {}
        self.copies: dict[int, Tensor] = {}
        self.iterators: dict[int, tuple[Any, Any]] = {}  # with how far they had come
        self._tuples: dict[int, tuple[Any, ...]] = {}
        self._memory: dict[int, Any] = {}  # copies of storages
        waiting = list(values)
        while waiting and len(self.objects) < _MOST_OBJECTS:
            value = waiting.pop()
            number = id(value)
            if number in self.objects or number in self.tensors or number in self._tuples or type(value) in _PLAIN:
                continue
            if type(value) in COMMON:  # other kinds take longer to tell apart
                waiting += self._taken(value, COMMON[type(value)])
            elif isinstance(value, Tensor):
                if not isinstance(value, FakeTensor) and not value.is_meta and not _is_trained(value):
                    self.tensors[number] = value, version_of(value)
                    if value.layout is torch.strided and value.untyped_storage().nbytes() <= most_bytes:
                        self.copies[number] = self._copied(value)
            elif isinstance(value, tuple | frozenset):
                self._tuples[number] = tuple(value)
                waiting += value
            elif isinstance(value, ref):
                self._tuples[number] = (value(),)
                waiting.append(value())
            elif can_be_used_up(value) and not hasattr(type(value), "gives_the_same"):
                self.iterators[number] = value, position_of(value)
            elif (kind := kind_of(value)) is not None:
                waiting += self._taken(value, kind)

    def _taken(self, value: Any, kind: Kind) -> list[Any]:
        """Take what an object holds, and return what else to look into."""
        state = kind.take(value)
        self.objects[id(value)] = value, kind, state
        if not kind.holds_objects or len(state) > _MOST:
            return []
        return [item for item in items_of(state) if type(item) not in _PLAIN]

    def _copied(self, tensor: Tensor) -> Tensor:
        """Return a copy that shares its memory with copies of those with which the tensor shares its own."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_inference():
            return tensor.detach().clone()
        # By operations on tensors alone: not every device can clone a storage.
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memory:
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            self._memory[key] = storage, whole.clone()
        memory: Tensor = self._memory[key][1]
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def changed(self) -> set[int]:
        """Return the identities of what holds something else by now, or has gone on."""
        objects = {
            number for number, (value, kind, state) in self.objects.items() if not kind.is_same(state, kind.take(value))
        }
        iterators = {number for number, (value, before) in self.iterators.items() if position_of(value) != before}
        return objects | iterators | self.changed_tensors()

    def carried(self) -> set[int]:
        """Return the identities of what a later forward finds changed: not of lists in which others only store values.

        >>> mine = [1], [torch.ones(1)]
        >>> before = Snapshot([mine], most_bytes=64)
        >>> mine[0].append(2); mine[1].append(torch.ones(2)); before.carried() == {id(mine[0])}
        True
        """
        return {
            number
            for number in self.changed()
            if number not in self.objects or _differ_in_numbers(*self.objects[number])
        }

    def changed_tensors(self) -> set[int]:
        """Return the identities of tensors that were changed in place, by version, or by value if there are copies."""
        return {
            number
            for number, (tensor, version) in self.tensors.items()
            if version_of(tensor) != version or (number in self.copies and _differ(tensor, self.copies[number]))
        }

    def reaches(self, value: Any, numbers: set[int]) -> bool:
        """Whether a value was one of these objects, or held one."""
        return bool(numbers) and not numbers.isdisjoint(self._reached([value]))

    def is_small(self, value: Any, most: int) -> bool:
        """Whether a value held at most so many objects that can change, each of as many items: not tensors alone."""
        objects = [self.objects[number] for number in self._reached([value]) if number in self.objects]
        return 0 < len(objects) <= most and all(
            not hasattr(state, "__len__") or len(state) <= most for _, kind, state in objects if kind.holds_objects
        )

    def holds(self, value: Any) -> bool:
        """Whether an iterator is among the values."""
        return id(value) in self.iterators

    def within(self, values: Iterable[Any]) -> Snapshot:
        """Return what was taken of these values alone."""
        numbers = self._reached(values)
        part = Snapshot((), most_bytes=-1)
        part.objects = {number: taken for number, taken in self.objects.items() if number in numbers}
        part.tensors = {number: taken for number, taken in self.tensors.items() if number in numbers}
        part.copies = {number: copy for number, copy in self.copies.items() if number in numbers}
        return part

    def _reached(self, values: Iterable[Any]) -> set[int]:
        reached, waiting = set[int](), list(values)
        while waiting:
            number = id(waiting.pop())
            if number not in reached:
                reached.add(number)
                waiting += self._tuples.get(number, ())
                _, kind, state = self.objects.get(number, (None, None, None))
                waiting += items_of(state) if kind is not None and kind.holds_objects else ()
        return reached

    def stand_in(self, value: Any) -> Any:
        """Return the copy of a tensor, a tuple with copies in it, or the value itself."""
        return replaced(value, lambda item: self.copies.get(id(item), item))

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Let objects hold inside what they held, with copies for tensors; afterwards what they hold now."""
        now = [(value, kind, kind.take(value)) for value, kind, _ in self.objects.values()]
        try:
            for value, kind, state in self.objects.values():
                _put(value, kind, with_items(state, self.stand_in) if kind.holds_objects and self.copies else state)
            yield
        finally:
            for value, kind, state in now:
                _put(value, kind, state)

    def rewind(self) -> None:
        """Let objects and tensors hold again what they held."""
        for value, kind, state in self.objects.values():
            _put(value, kind, state)
        changed = self.changed_tensors()
        with torch.no_grad():
            for number, (tensor, _) in self.tensors.items():
                if number in changed and number in self.copies:
                    tensor.copy_(self.copies[number])


def _put(value: Any, kind: Kind, state: Any) -> None:
    if not kind.is_same(state, kind.take(value)):
        kind.put(value, state)


def _differ_in_numbers(value: Any, kind: Kind, state: Any) -> bool:
    if not kind.holds_objects:
        return True
    before, now = ([item for item in items_of(each) if isinstance(item, Number)] for each in (state, kind.take(value)))
    return before != now


def replaced(value: Any, by: Callable[[Any], Any]) -> Any:
    """Return what stands for a value, also inside of tuples; the same tuple if nothing in it is replaced.

    >>> replaced((1, (2, "a")), lambda item: item + 1 if isinstance(item, int) else item)
    (2, (3, 'a'))
    """
    if not isinstance(value, tuple):
        return by(value)
    items = [replaced(item, by) for item in value]
    if all(item is other for item, other in zip(items, value, strict=True)):
        return value
    return value._make(items) if hasattr(value, "_make") else type(value)(items)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; 0 for one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


def _is_trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _differ(tensor: Tensor, copy: Tensor) -> bool:
    if tensor.shape != copy.shape or tensor.dtype != copy.dtype:
        return True
    if type(tensor) not in (Tensor, nn.Parameter):
        return False
    same = tensor.detach() == copy
    if tensor.is_floating_point() or tensor.is_complex():
        same |= tensor.detach().isnan() & copy.isnan()
    return not bool(same.all())
