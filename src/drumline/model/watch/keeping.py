"""Restore what a run of a model changes besides gradients, so that the next run finds it as it was.

::

    buffers, modes, attributes of modules            put back
    frozen weights of modules of the user's own      so are these, up to 1 GiB
    lists, dicts, sets, plain tensors, arrays,       what is in them is restored, wherever modules or the code
    random generators, objects of the user's own     of their classes reach them: attributes, globals, closures
    anything else (iterators, files, C++ objects)    stays as the run left it
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from drumline.model.randomness import OWN_GENERATORS, HostChance, Randomness, set_own, state_of_own
from drumline.model.values import content_of
from drumline.model.watch.fingerprint import PLAIN
from drumline.model.watch.surroundings import Surroundings, is_known

PutBack = Callable[[], None]

_TORCHS_OWN = {
    "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
    "_backward_pre_hooks",
}  # fmt: skip
_WHOLE = (*PLAIN, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
_CODE = (type, FunctionType, BuiltinFunctionType, property, staticmethod, classmethod, MemberDescriptorType)
_USED = (nn.Module, FunctionType, MethodType, partial, *OWN_GENERATORS)  # by functions, without being watched
_DEPTH = 5
_MOST = 4096  # entries of a container that are looked into
MOST_FROZEN_BYTES = 2**30  # of frozen weights that are copied, because a forward may change them
_MOST_BYTES = 2**26  # of a tensor or an array that is kept


@contextmanager
def undisturbed(modules: Iterable[nn.Module] = (), loss: Any = None) -> Iterator[None]:
    """Restore buffers, modes and attributes of modules afterwards, and what their code keeps elsewhere.

    So with a loss: a module, a function, a method, a `partial`, or an object that is called.

    >>> layer = nn.Identity()
    >>> layer.seen = [1]
    >>> with undisturbed([layer]):
    ...     layer.seen.append(2)
    >>> layer.seen
    [1]
    """
    roots = _behind(loss)
    modules = [*modules, *(module for root in roots if isinstance(root, nn.Module) for module in root.modules())]
    memory = Memory()
    memory.note([*modules, *roots])
    frozen = [(parameter, parameter.detach().clone()) for parameter in _frozen_in(modules)]
    variables = Surroundings(modules, roots).variables()
    memory.note(value for value, _ in variables)
    kinds = dict.fromkeys(cls for kind in dict.fromkeys(map(type, modules)) for cls in kind.__mro__)
    spaces = [(cls, _fields_of(cls)) for cls in kinds if not is_known(cls)]
    memory.note(attribute for _, space in spaces for attribute in space.values())
    try:
        yield
    finally:
        for value, put in variables:
            put(value)
        for cls, space in spaces:
            for name, value in space.items():
                if vars(cls).get(name) is not value:
                    setattr(cls, name, value)
        memory.put_back()
        with torch.no_grad():
            for parameter, before in frozen:
                if not _same_bits(parameter, before):
                    parameter.copy_(before)


@contextmanager
def nothing_left(modules: Sequence[nn.Module], randomness: Randomness, loss: Any = None) -> Iterator[HostChance]:
    """Restore that and the state of random generators afterwards; yield those of Python and numpy."""
    chance = HostChance()
    with undisturbed(modules, loss), randomness.kept_aside(), chance.keeping_state():
        yield chance


def of_own_code(modules: Iterable[nn.Module]) -> set[int]:
    """Return the ids of modules that are of a user's class, or inside of one: their code may change their weights.

    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> of_own_code(model.modules())
    set()
    """
    own_ids: set[int] = set()
    for module in modules:
        if id(module) not in own_ids and not is_known(type(module)):
            own_ids.update(map(id, module.modules()))
    return own_ids


def sample_of(weight: Tensor) -> Tensor:
    """Return a copy of a few of a weight's elements.

    >>> sample_of(torch.arange(6.0)).tolist()
    [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    """
    if type(weight) not in (Tensor, nn.Parameter) or weight.layout is not torch.strided or weight.is_meta:
        return torch.empty(0)
    return weight.detach().reshape(-1)[:: max(1, weight.numel() // 64)].clone()


def _frozen_in(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the frozen weights that code of the user's own may change: a teacher that follows a student."""
    own_ids = of_own_code(modules)
    weights = {
        id(weight): weight
        for module in modules
        if id(module) in own_ids
        for weight in module._parameters.values()
        if weight is not None and not weight.requires_grad and type(weight) is nn.Parameter and not weight.is_meta
    }
    return list(weights.values()) if sum(each.nbytes for each in weights.values()) <= MOST_FROZEN_BYTES else []


def _behind(loss: Any) -> list[Any]:
    """Return what a loss consists of: functions, objects of methods, and modules and generators that they use."""
    objects: dict[int, Any] = {}
    waiting = [loss]
    while waiting:
        method_type = waiting.pop()
        if id(method_type) in objects:
            continue
        objects[id(method_type)] = method_type
        if isinstance(method_type, partial):
            waiting += [method_type.func, *method_type.args, *method_type.keywords.values()]
        elif isinstance(method_type, MethodType):
            waiting += [method_type.__self__, method_type.__func__]
        elif isinstance(method_type, FunctionType) and not is_known(method_type):
            space = method_type.__globals__
            values = [content_of(cell) for cell in method_type.__closure__ or ()]
            values += [space[name] for name in method_type.__code__.co_names if name in space]
            waiting += [value for value in values if isinstance(value, _USED)]
    return list(objects.values())


def _fields_of(cls: type) -> dict[str, Any]:
    """Return the values that a class holds, without its code."""
    named = {name: attribute for name, attribute in vars(cls).items() if not name.startswith("__")}
    return {name: index for name, index in named.items() if isinstance(index, PLAIN) or not isinstance(index, _CODE)}


class Memory:
    """What values hold, and functions that put it back."""

    def __init__(self) -> None:
        self._seen_ids: set[int] = set()
        self._alive: list[Any] = []  # so that no id is used again
        self._puts: list[PutBack] = []

    def note(self, values: Iterable[Any], depth: int = _DEPTH) -> None:
        """Take note of what values hold."""
        for value in values:
            if isinstance(value, _WHOLE) or id(value) in self._seen_ids:
                continue
            self._seen_ids.add(id(value))
            self._alive.append(value)
            put, inside = _contents_of(value)
            if put is not None:
                self._puts.append(put)
            if isinstance(value, nn.Module):
                self.note(inside)
            elif depth and len(inside) <= _MOST:
                self.note(inside, depth - 1)

    def put_back(self) -> None:
        """Restore what has changed."""
        for put in self._puts:
            put()


def _contents_of(value: Any) -> tuple[PutBack | None, Sequence[Any]]:
    """Return a function that restores what a value holds, and what it holds."""
    if isinstance(value, Tensor):
        return _of_tensor(value), ()
    if isinstance(value, nn.Module):
        return _of_module(value)
    if isinstance(value, list | deque | dict | set):
        inside = value.values() if isinstance(value, dict) else value
        return _of_container(value), list(inside)
    if isinstance(value, tuple):
        return None, value
    if isinstance(value, np.ndarray):
        return (None if value.nbytes > _MOST_BYTES or value.dtype.hasobject else _of_array(value)), ()
    if isinstance(value, OWN_GENERATORS):
        return (None if isinstance(value, random.SystemRandom) else _of_generator(value)), ()  # that has no state
    return (None, ()) if is_known(type(value)) else _of_object(value)


def _of_module(module: nn.Module) -> tuple[PutBack, Sequence[Any]]:
    """Return what restores a module's buffers, mode and attributes, and what it holds."""
    table = dict(module._buffers)
    copies = [(tensor, tensor.detach().clone()) for tensor in table.values() if tensor is not None]
    attributes = {name: attribute for name, attribute in vars(module).items() if name not in _TORCHS_OWN}

    def put() -> None:
        with torch.no_grad():
            for tensor, before in copies:
                if not _same_bits(tensor, before):
                    tensor.copy_(before)
        module._buffers.clear()
        module._buffers.update(table)
        for name in [name for name in vars(module) if name not in attributes and name not in _TORCHS_OWN]:
            del module.__dict__[name]
        module.__dict__.update(attributes)

    return put, [*attributes.values(), *module._modules.values()]


def _same_bits(buffer: Tensor, before: Tensor) -> bool:
    return buffer.shape == before.shape and buffer.device == before.device and torch.equal(buffer, before)


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


def _of_generator(generator: Any) -> PutBack:
    before = state_of_own(generator)

    def put() -> None:
        now = state_of_own(generator)
        if not (isinstance(now, Tensor) and torch.equal(now, before)):  # else another thread may be using it
            set_own(generator, before)

    return put


def _of_array(array: Any) -> PutBack:
    before = array.copy()

    def put() -> None:
        if array.shape == before.shape and array.flags.writeable:
            array[...] = before

    return put


def _of_container(value: Any) -> PutBack:
    """Return what restores the items of a list, a dict or a set; one that holds the same ones is left alone."""
    content = dict(value) if isinstance(value, dict) else list(value)
    before = [id(item) for item in _items(value)]

    def put() -> None:
        if [id(item) for item in _items(value)] != before:
            value.clear()
            (value.extend if isinstance(value, list | deque) else value.update)(content)

    return put


def _items(value: Any) -> list[Any]:
    return [*value, *value.values()] if isinstance(value, dict) else list(value)


def _of_object(value: Any) -> tuple[PutBack | None, Sequence[Any]]:
    """Return what restores the fields of an object of a user's class, and these."""
    space = getattr(value, "__dict__", None)
    fields = dict(space) if isinstance(space, dict) else {}
    slots = [
        name
        for cls in type(value).__mro__
        for name, attribute in vars(cls).items()
        if isinstance(attribute, MemberDescriptorType) and hasattr(value, name)
    ]
    inside = {name: getattr(value, name) for name in slots}
    if not isinstance(space, dict) and not slots:
        return None, ()

    def put() -> None:
        if isinstance(space, dict) and (
            space.keys() != fields.keys() or any(space[key] is not attribute for key, attribute in fields.items())
        ):
            space.clear()
            space.update(fields)
        for name, attribute in inside.items():
            if getattr(value, name, None) is not attribute:
                object.__setattr__(value, name, attribute)

    return put, [*fields.values(), *inside.values()]
