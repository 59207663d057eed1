"""What an object holds, one level deep: taken from it, compared, and put into the same object again.

    list, deque, set, dict     its items
    an object of the user's    its fields
    an array, a bytearray      its numbers
    a random generator         its state

Other objects remember nothing that can be taken: numbers and text are replaced, not changed; iterators and files go on.
"""

from __future__ import annotations

import random
import threading
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from io import IOBase
from itertools import count
from operator import eq, is_, length_hint
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from drumline.model.randomness import OWN_GENERATORS, set_own, state_of_own
from drumline.model.watch.fingerprint import PLAIN
from drumline.model.watch.surroundings import is_known

_WHOLE = (*PLAIN, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, nn.Module, Tensor)
_PLAIN = frozenset(PLAIN)
_EVERYBODYS = frozenset(map(id, (torch.default_generator, np.random.mtrand._rand, random._inst)))


class GivenBack:
    """An iterator with items that were taken from it too early, and come again.

    >>> words = GivenBack(iter("c"), ["a", "b"])
    >>> list(words)
    ['a', 'b', 'c']
    """

    __slots__ = ("items", "num_taken", "source")  # and no __dict__: whoever compares it does so by identity

    def __init__(self, source: Any, items: Iterable[Any]) -> None:
        self.source, self.items, self.num_taken = source, deque(items), 0

    def __iter__(self) -> GivenBack:
        return self

    def __next__(self) -> Any:
        self.num_taken += 1
        return self.items.popleft() if self.items else next(self.source)

    def __len__(self) -> int:
        return len(self.items) + len(self.source)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in GivenBack.__slots__:
            raise AttributeError(name)
        return getattr(self.source, name)


class Kind(NamedTuple):
    """How to take what an object of some kind holds, and how to put it back."""

    take: Callable[[Any], Any]
    put: Callable[[Any, Any], None]
    is_same: Callable[[Any, Any], bool]
    holds_objects: bool = True


def kind_of(value: Any) -> Kind | None:
    """Return how to take what an object holds; None if there is nothing to take.

    >>> kind = kind_of([1])
    >>> mine = [1]; before = kind.take(mine); mine.append(2); kind.put(mine, before); mine
    [1]
    >>> kind_of(1), kind_of(iter([1]))
    (None, None)
    """
    if type(value) in _PLAIN or isinstance(value, _WHOLE):
        return None
    for classes, kind in _KINDS:
        if isinstance(value, classes):
            return None if id(value) in _EVERYBODYS or isinstance(value, random.SystemRandom) else kind
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject or not value.flags.writeable else _ARRAY
    if is_known(type(value)) or isinstance(value, tuple | frozenset):
        return None
    return _OBJECT if isinstance(getattr(value, "__dict__", None), dict) or any(_slots(value)) else None


def position_of(value: Any) -> Any:
    """Return how far an iterator has come, as far as it says so.

    >>> words = iter(["a", "b"])
    >>> before = position_of(words); word = next(words); position_of(words) == before
    False
    """
    if isinstance(value, GivenBack):
        return value.num_taken
    if isinstance(value, IOBase) or not hasattr(type(value), "__length_hint__"):
        return getattr(getattr(value, "gi_frame", None), "f_lasti", None), repr(value) if type(value) is count else ""
    return length_hint(value)


def items_of(state: Any) -> Iterable[Any]:
    """Return the values in what was taken of an object that holds others."""
    return state.values() if isinstance(state, dict) else state


def with_items(state: Any, replaced: Callable[[Any], Any]) -> Any:
    """Return what was taken of an object, with other values in it.

    >>> with_items({"a": 1}, lambda value: value + 1), with_items([1, 2], lambda value: -value)
    ({'a': 2}, [-1, -2])
    """
    if isinstance(state, dict):
        return {key: replaced(value) for key, value in state.items()}
    return [replaced(value) for value in state]


def are_same(state: Any, other: Any) -> bool:
    """Whether two lists or dicts hold the same objects; equal numbers and text are the same.

    >>> are_same([1.5], [3 / 2]), are_same([[]], [[]]), are_same({"a": 1}, {"a": True})
    (True, False, False)
    """
    return _same_entries(state, other) if isinstance(state, dict) else _same_items(state, other)


def _same_items(state: Any, other: Any) -> bool:
    # Mostly these are the very same objects, which takes less time to see.
    return len(state) == len(other) and (all(map(is_, state, other)) or all(map(is_same_value, state, other)))


def _same_entries(state: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return [*state] == [*other] and _same_items(state.values(), other.values())


def is_same_value(value: Any, other: Any) -> bool:
    """Whether two values are one object, or equal numbers or text of one type."""
    return value is other or (type(value) is type(other) and type(value) in _PLAIN and value == other)


def _put_items(value: Any, state: list[Any]) -> None:
    value.clear()
    (value.update if isinstance(value, set) else value.extend)(state)


def _put_entries(value: Any, state: dict[Any, Any]) -> None:
    value.clear()
    for key, entry in state.items():
        value[key] = entry


def _slots(value: Any) -> Iterator[str]:
    for cls in type(value).__mro__:
        for name, attribute in vars(cls).items():
            if isinstance(attribute, MemberDescriptorType) and name != "__dict__":
                yield name


def _fields(value: Any) -> dict[str, Any]:
    slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
    return {**getattr(value, "__dict__", {}), **slots}


def _put_fields(value: Any, state: dict[str, Any]) -> None:
    slots = set(_slots(value))
    for name in [name for name in _fields(value) if name not in state]:
        object.__delattr__(value, name)
    space = getattr(value, "__dict__", {})
    for name, field in state.items():
        if name in slots:
            object.__setattr__(value, name, field)
        else:
            space[name] = field


def _copied(value: Any) -> Any:
    return value[:]


def _put_all(value: Any, state: Any) -> None:
    value[:] = state


def _put_numbers(value: Any, state: Any) -> None:
    value[...] = state


def _is_same_state(state: Any, other: Any) -> bool:
    """Whether two states of generators are the same: tensors, tuples, or dicts with arrays in them."""
    if isinstance(state, dict):
        return all(_is_same_state(entry, other[key]) for key, entry in state.items())
    if isinstance(state, Tensor):
        return torch.equal(state, other)
    return bool(np.array_equal(state, other)) if isinstance(state, np.ndarray) else bool(state == other)


_DICT, _LIST = Kind(dict, _put_entries, _same_entries), Kind(list, _put_items, _same_items)
COMMON: dict[type, Kind] = {dict: _DICT, list: _LIST, set: _LIST}  # by the class itself: see kind_of for others
_KINDS = (
    (dict, _DICT),
    ((list, deque, set), _LIST),
    (OWN_GENERATORS, Kind(state_of_own, set_own, _is_same_state, holds_objects=False)),
    ((array, bytearray), Kind(_copied, _put_all, eq, holds_objects=False)),
    ((SimpleNamespace, Namespace, threading.local), Kind(_fields, _put_fields, _same_entries)),
)
_ARRAY = Kind(np.copy, _put_numbers, lambda a, b: bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc")), False)
_OBJECT = Kind(_fields, _put_fields, _same_entries)
