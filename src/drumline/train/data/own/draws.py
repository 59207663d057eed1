"""The random numbers that data of the user's draw, kept apart from those of training.

Data may draw from torch's, numpy's or Python's global generator (`DataLoader(shuffle=True)` does), and from generators
of their own. Training draws from the global ones as well. So data get global states of their own, which are in place
only while data are read:

    training     ──────┐   ┌───────────┐   ┌──────        the same generators,
    data               └───┘           └───┘              two states of each

The random numbers of data then depend only on the state at the start of an epoch and on how many batches were read
since. Both are in a checkpoint.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from drumline.channel.launch.by_name import codes
from drumline.model.randomness import OWN_GENERATORS, set_own, state_of_own

_DEEPEST, _MOST = 8, 5000  # how far and how many objects are looked at
_LONGEST = 256  # items of a list or dict: longer ones hold samples
_OURS = ("torch", "numpy", "builtins", "collections", "random", "typing", "abc")  # whose functions hide no generator

Get = Callable[[], Any]
Set = Callable[[Any], Any]
_GLOBAL: dict[str, tuple[Get, Set]] = {
    "torch": (torch.get_rng_state, torch.set_rng_state),
    "numpy": (lambda: np.random.get_state(legacy=False), np.random.set_state),
    "python": (random.getstate, random.setstate),
}


class Draws:
    """The generators that some data draw from, beginning with what the global ones would draw now."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._global_states = _now()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the global generators be the data's for a while."""
        before = _now()
        _put(self._global_states)
        try:
            yield
        finally:
            self._global_states = _now()
            _put(before)

    def state(self) -> dict[str, Any]:
        """Return where all of them are: the global ones by name, and those in the data by where they are held."""
        held_states = {where: state_of_own(generator) for where, generator in generators_in(self._source).items()}
        return {"global": dict(self._global_states), "held": held_states}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Let all of them continue from where they were."""
        self._global_states = dict(state["global"])
        held_generators = generators_in(self._source)
        for where, value in state["held"].items():
            if where in held_generators:
                set_own(held_generators[where], value)


def _now() -> dict[str, Any]:
    return {name: get() for name, (get, _) in _GLOBAL.items()}


def _put(states: Mapping[str, Any]) -> None:
    for name, (_, put) in _GLOBAL.items():
        put(states[name])


def generators_in(source: Any) -> dict[str, Any]:
    """Return the generators that an object holds, by where: in attributes, lists, closures, and globals of its code.

    >>> from torch.utils.data import DataLoader
    >>> list(generators_in(DataLoader([1, 2], shuffle=True, generator=torch.Generator())))
    ['.generator']
    >>> list(generators_in({"mine": [random.Random(0), None]}))
    ["['mine'][0]"]
    """
    generators: dict[str, Any] = {}
    ids: set[int] = set()
    waiting: list[tuple[str, Any, int]] = [("", source, 0)]
    while waiting and len(ids) < _MOST:
        where, item, depth = waiting.pop(0)
        if id(item) in ids or item is None or isinstance(item, str | bytes | int | float | ModuleType | torch.Tensor):
            continue
        ids.add(id(item))
        if isinstance(item, OWN_GENERATORS):
            if not (
                _is_global(item) or isinstance(item, random.SystemRandom)
            ):  # the latter has no state: see resume_trial.py
                generators.setdefault(where, item)
        elif depth < _DEEPEST:
            waiting += [(where + step, inner, depth + 1) for step, inner in _inside(item)]
    return generators


def _is_global(generator: Any) -> bool:
    shared = (torch.default_generator, getattr(random, "_inst", None), getattr(np.random.mtrand, "_rand", None))
    return any(generator is source for source in shared) or generator is getattr(shared[2], "_bit_generator", None)


def _inside(method_type: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, by how it is reached; properties are not asked, they may do anything."""
    if isinstance(method_type, Mapping):
        if type(method_type) is dict and len(method_type) <= _LONGEST:
            yield from ((f"[{name!r:.40}]", inner) for name, inner in method_type.items())
    elif isinstance(method_type, list | tuple | set | frozenset):
        if len(method_type) <= _LONGEST:
            yield from ((f"[{at}]", inner) for at, inner in enumerate(method_type))
    elif isinstance(method_type, MethodType):
        yield from ((".__self__", method_type.__self__), (".__func__", method_type.__func__))
    elif isinstance(method_type, FunctionType):
        yield from _of_function(method_type)
    elif isinstance(method_type, partial):
        yield from ((".func", method_type.func), (".args", method_type.args), (".keywords", method_type.keywords))
    elif not isinstance(method_type, type):
        yield from _of_object(method_type)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object's attributes, and the functions of its classes, whose code may name generators."""
    names = vars(value) if hasattr(value, "__dict__") else {}
    yield from ((f".{name}", inner) for name, inner in names.items())
    for kind in type(value).__mro__:
        if kind.__module__.partition(".")[0] in _OURS:
            continue
        slots = kind.__dict__.get("__slots__", ())
        held_names = [name for name in ((slots,) if isinstance(slots, str) else slots) if hasattr(value, name)]
        yield from ((f".{name}", getattr(value, name)) for name in held_names)
        for name, inner in kind.__dict__.items():
            if isinstance(inner, (FunctionType, *OWN_GENERATORS)):
                yield f".{name}", inner


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what a function closes over, its defaults, and generators among the globals that its code names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f"({name})", cell.cell_contents
        except ValueError:
            continue  # not assigned yet
    yield "()", list(function.__defaults__ or ())
    yield "(*)", dict(function.__kwdefaults__ or {})
    if function.__module__ is not None and function.__module__.partition(".")[0] in _OURS:
        return
    for name in dict.fromkeys(name for code in codes(function.__code__) for name in code.co_names):
        inner = function.__globals__.get(name)
        if isinstance(inner, (FunctionType, *OWN_GENERATORS)):
            yield f"::{name}", inner
