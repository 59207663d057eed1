"""What a loss function keeps between its calls, put back after calls that must leave no trace.

A loss may be a module with buffers, a method of an object, or a function with variables of its own: a counter, a list
of values to log, a running mean. Calls that only compare must not count, log or average.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.values import MISSING, content_of

_MOST_BYTES = 2**26  # of one tensor that is kept
_MOST = 10_000  # things looked at
_DEPTH = 3  # of lists and objects inside of each other
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType, torch.dtype, torch.device)


@contextmanager
def untouched(loss_fn: Any) -> Iterator[None]:
    """Put back afterwards what the function, its object and the variables it closes over hold.

    >>> seen = []
    >>> with untouched(lambda x: seen.append(x)):
    ...     seen.append(1)
    >>> seen
    []
    """
    undo: list[Callable[[], None]] = []
    _keep(loss_fn, undo, set())
    try:
        yield
    finally:
        with torch.no_grad():
            for one in reversed(undo):
                one()


def _keep(root: Any, undo: list[Callable[[], None]], seen: set[int]) -> None:
    todo = [(root, 0)]
    while todo and len(seen) < _MOST:
        value, depth = todo.pop()
        if isinstance(value, _PLAIN) or id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            _keep_tensor(value, undo)
        elif isinstance(value, nn.Module):
            todo += [(one, depth + 1) for one in _of_module(value, undo, seen)]
        elif isinstance(value, functools.partial):
            todo += [(one, depth) for one in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, types.MethodType):
            todo += [(value.__self__, depth), (value.__func__, depth)]
        elif isinstance(value, types.FunctionType):
            todo += [(one, depth + 1) for one in _of_function(value, undo)]
        elif depth < _DEPTH:
            todo += [(one, depth + 1) for one in _of_object(value, undo)]


def _of_module(value: nn.Module, undo: list[Callable[[], None]], seen: set[int]) -> list[Any]:
    found = []
    for module in value.modules():
        seen.add(id(module))
        undo.append(_attributes(module))
        found += [one for table in (module._buffers, vars(module)) for one in table.values() if _is_state(one)]
    return found


def _of_function(value: types.FunctionType, undo: list[Callable[[], None]]) -> list[Any]:
    cells = value.__closure__ or ()
    undo += [functools.partial(_fill, cell, content_of(cell)) for cell in cells]
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return [*(content_of(cell) for cell in cells), *defaults, *_globals(value, undo)]


def _of_object(value: Any, undo: list[Callable[[], None]]) -> list[Any]:
    if type(value) in (list, deque, dict, set):
        undo.append(_contents(value))
        return list(value.values() if isinstance(value, dict) else value)
    if type(value) is tuple:
        return list(value)
    # An object that steps is an optimizer or a pipeline, which no loss changes.
    if not hasattr(value, "__dict__") or callable(getattr(type(value), "step", None)):
        return []
    undo.append(_attributes(value))
    return list(vars(value).values())


def _globals(function: types.FunctionType, undo: list[Callable[[], None]]) -> list[Any]:
    """Keep the global variables that a function names, and return those that can change."""
    space = function.__globals__
    named = {name: space[name] for name in function.__code__.co_names if name in space}

    def put_back() -> None:
        for name, value in named.items():
            if space.get(name) is not value:
                space[name] = value

    undo.append(put_back)
    own = [one for one in named.values() if getattr(one, "__module__", "") == function.__module__]
    return [one for one in named.values() if _is_state(one)] + [
        one for one in own if isinstance(one, types.FunctionType)
    ]


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor | list | deque | set) or type(value) is dict


def _keep_tensor(value: Tensor, undo: list[Callable[[], None]]) -> None:
    """Keep a tensor that is no parameter: losses may change those of their own."""
    if isinstance(value, nn.Parameter) or value.nbytes > _MOST_BYTES or value.is_meta or value.is_inference():
        return
    if value.layout is not torch.strided:
        return
    before, version = value.detach().clone(), value._version

    def put_back() -> None:
        if value._version != version:
            value.detach().copy_(before)

    undo.append(put_back)


def _attributes(value: Any) -> Callable[[], None]:
    before = dict(vars(value))
    tables = {name: dict(before[name]) for name in ("_buffers",) if isinstance(before.get(name), dict)}

    def put_back() -> None:
        there = vars(value)
        for name in [one for one in there if one not in before]:
            del there[name]
        there.update(before)
        for name, content in tables.items():
            there[name].clear()
            there[name].update(content)

    return put_back


def _contents(value: Any) -> Callable[[], None]:
    content = value.copy()

    def put_back() -> None:
        if isinstance(value, dict | set):
            value.clear()
            value.update(content)
        else:
            value.clear()
            value.extend(content)

    return put_back


def _fill(cell: Any, content: Any) -> None:
    if content is not MISSING and content_of(cell) is not content:
        cell.cell_contents = content
