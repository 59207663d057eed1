"""Put back what a run of a model changes besides gradients, so that the next run finds it as it was.

::

    buffers, modes, attributes of modules            put back
    lists, dicts, sets, plain tensors, arrays,       what is in them is put back, wherever modules or the code
    random generators, objects of the user's own     of their classes reach them: attributes, globals, closures
    anything else (iterators, files, C++ objects)    stays as the run left it
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drumline.model.randomness import HostChance, Randomness
from drumline.model.values import content_of
from drumline.model.watch.fingerprint import LIBRARIES, PLAIN
from drumline.model.watch.watch import Surroundings

PutBack = Callable[[], None]

_TORCHS_OWN = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks",
}  # fmt: skip
_WHOLE = (*PLAIN, nn.Module, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_CODE = (type, FunctionType, BuiltinFunctionType, property, staticmethod, classmethod, MemberDescriptorType)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
_DEPTH = 5
_MOST = 4096  # entries of a container that are looked into
_MOST_BYTES = 2**26  # of a tensor or an array that is kept


@contextmanager
def undisturbed(modules: Sequence[nn.Module], loss: Any = None) -> Iterator[None]:
    """Restore buffers, modes and attributes of modules afterwards, and what their code keeps elsewhere.

    So with a loss: a module, a function, or an object that is called.

    >>> layer = nn.Identity()
    >>> layer.seen = [1]
    >>> with undisturbed([layer]):
    ...     layer.seen.append(2)
    >>> layer.seen
    [1]
    """
    modules = [*modules, *(loss.modules() if isinstance(loss, nn.Module) else ())]
    tables = [(module, dict(module._buffers)) for module in modules]
    values = {id(one): (one, one.detach().clone()) for _, table in tables for one in table.values() if one is not None}
    attributes = [({name: one for name, one in vars(module).items() if name not in _TORCHS_OWN}) for module in modules]
    memory = Memory(known=values)
    memory.note(one for each in attributes for one in each.values())
    memory.note([loss, getattr(loss, "__self__", None), *_generators_of(loss)])
    variables = Surroundings(modules, [loss]).variables()
    memory.note(value for value, _ in variables)
    kinds = dict.fromkeys(cls for kind in dict.fromkeys(map(type, modules)) for cls in kind.__mro__)
    spaces = [(cls, _fields_of(cls)) for cls in kinds if not _is_librarys(cls)]
    memory.note(one for _, space in spaces for one in space.values())
    try:
        yield
    finally:
        with torch.no_grad():
            for one, before in values.values():
                if not _same_bits(one, before):
                    one.copy_(before)
        for module, table in tables:
            module._buffers.clear()
            module._buffers.update(table)
        for module, before_it in zip(modules, attributes, strict=True):
            for name in [name for name in vars(module) if name not in before_it and name not in _TORCHS_OWN]:
                del module.__dict__[name]
            module.__dict__.update(before_it)
        for value, put in variables:
            put(value)
        for cls, space in spaces:
            for name, value in space.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
        memory.put_back()


@contextmanager
def nothing_left(modules: Sequence[nn.Module], randomness: Randomness, loss: Any = None) -> Iterator[HostChance]:
    """Restore that and the state of random generators afterwards; yield those of Python and numpy."""
    chance = HostChance()
    with undisturbed(modules, loss), randomness.kept_aside(), chance.kept():
        yield chance


def _generators_of(loss: Any) -> list[Any]:
    """Return the random generators that a loss function has by its closure or its globals."""
    function = getattr(loss, "__func__", loss)
    if not isinstance(function, FunctionType):
        return []
    space = function.__globals__
    values = [content_of(cell) for cell in function.__closure__ or ()]
    values += [space[name] for name in function.__code__.co_names if name in space]
    return [one for one in values if isinstance(one, _GENERATORS)]


def _same_bits(buffer: Tensor, before: Tensor) -> bool:
    return buffer.shape == before.shape and buffer.device == before.device and torch.equal(buffer, before)


def _fields_of(cls: type) -> dict[str, Any]:
    """Return the values that a class holds, without its code."""
    named = {name: one for name, one in vars(cls).items() if not name.startswith("__")}
    return {name: one for name, one in named.items() if isinstance(one, PLAIN) or not isinstance(one, _CODE)}


def _is_librarys(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in LIBRARIES | {"drumline"}


class Memory:
    """What values hold, and functions that put it back; `known` are ids of what somebody else puts back."""

    def __init__(self, known: Iterable[int] = ()) -> None:
        self._seen = set(known)
        self._alive: list[Any] = []  # so that no id is used again
        self._puts: list[PutBack] = []

    def note(self, values: Iterable[Any], depth: int = _DEPTH) -> None:
        """Take note of what values hold."""
        for value in values:
            if isinstance(value, _WHOLE) or id(value) in self._seen:
                continue
            self._seen.add(id(value))
            self._alive.append(value)
            put, inside = _held(value)
            if put is not None:
                self._puts.append(put)
            if depth and len(inside) <= _MOST:
                self.note(inside, depth - 1)

    def put_back(self) -> None:
        """Put back what has changed."""
        for put in self._puts:
            put()


def _held(value: Any) -> tuple[PutBack | None, Sequence[Any]]:
    """Return a function that puts back what a value holds, and what it holds."""
    if isinstance(value, Tensor):
        return _of_tensor(value), ()
    if isinstance(value, list | deque):
        return _of_list(value), list(value)
    if isinstance(value, dict):
        return _of_dict(value), list(value.values())
    if isinstance(value, set):
        return _of_set(value), ()
    if isinstance(value, tuple):
        return None, value
    if isinstance(value, np.ndarray):
        return (None if value.nbytes > _MOST_BYTES or value.dtype.hasobject else _of_array(value)), ()
    if isinstance(value, torch.Generator):
        before = value.get_state()
        return lambda: None if torch.equal(value.get_state(), before) else _set(value.set_state, before), ()
    if isinstance(value, random.Random):
        state = value.getstate()
        return lambda: value.setstate(state), ()
    if isinstance(value, np.random.Generator):
        bits: Any = value.bit_generator
        drawn = bits.state
        return lambda: setattr(bits, "state", drawn), ()
    if isinstance(value, np.random.RandomState):
        whole: Any = value.get_state()
        return lambda: value.set_state(whole), ()
    return (None, ()) if _is_librarys(type(value)) else _of_object(value)


def _set(function: Callable[[Any], Any], value: Any) -> None:
    function(value)


def _of_tensor(tensor: Tensor) -> PutBack | None:
    """Return a function that undoes changes in place; what has a graph is no memory."""
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.is_inference() or tensor.is_meta:
        return None
    if tensor.layout is not torch.strided or tensor.nbytes > _MOST_BYTES:
        return None
    before, version = tensor.detach().clone(), tensor._version

    def put() -> None:
        if tensor._version != version and tensor.shape == before.shape:
            with torch.no_grad():
                tensor.copy_(before)

    return put


def _of_array(array: Any) -> PutBack:
    before = array.copy()

    def put() -> None:
        if array.shape == before.shape and array.flags.writeable:
            array[...] = before

    return put


def _of_list(value: Any) -> PutBack:
    items = list(value)

    def put() -> None:
        if len(value) != len(items) or any(one is not other for one, other in zip(value, items, strict=True)):
            value.clear()
            value.extend(items)

    return put


def _of_dict(value: Any) -> PutBack:
    items = dict(value)

    def put() -> None:
        if value.keys() != items.keys() or any(value[key] is not one for key, one in items.items()):
            value.clear()
            value.update(items)

    return put


def _of_set(value: Any) -> PutBack:
    items = set(value)

    def put() -> None:
        if value != items:
            value.clear()
            value.update(items)

    return put


def _of_object(value: Any) -> tuple[PutBack | None, Sequence[Any]]:
    """Return what puts back the fields of an object of a user's class, and these."""
    space = getattr(value, "__dict__", None)
    fields = dict(space) if isinstance(space, dict) else {}
    slots = [
        name
        for cls in type(value).__mro__
        for name, one in vars(cls).items()
        if isinstance(one, MemberDescriptorType) and hasattr(value, name)
    ]
    inside = {name: getattr(value, name) for name in slots}
    if not isinstance(space, dict) and not slots:
        return None, ()

    def put() -> None:
        if isinstance(space, dict) and (
            space.keys() != fields.keys() or any(space[key] is not one for key, one in fields.items())
        ):
            space.clear()
            space.update(fields)
        for name, one in inside.items():
            if getattr(value, name, None) is not one:
                object.__setattr__(value, name, one)

    return put, [*fields.values(), *inside.values()]
