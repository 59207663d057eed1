"""Variables outside of a model that its forward may read: globals, and what functions have captured.

    SCALE = 1.0                                     read by name in forward, or in a function that forward calls
    def forward(self, x): return x * SCALE

Which they are is read off the functions' code, without running it. Those of libraries are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from drumline.runtime.follow.ambient import FORWARD
from drumline.runtime.watch.fingerprint import PLAIN, can_change, fingerprint

Reader = Callable[[], Any]
_LIBRARIES = frozenset({"torch", "numpy", "drumline", "transformers", "builtins"}) | sys.stdlib_module_names
_MISSING: Any = object()


class Surroundings:
    """The variables that some modules' code may read, and what they were.

    >>> __name__ = "mine"  # not a part of this library
    >>> scale = [1.0]
    >>> class Scales(nn.Module):
    ...     def forward(self, x):
    ...         return x * scale[0]
    >>> around = Surroundings([Scales()])
    >>> before = around.now()
    >>> scale[0] = 2.0
    >>> around.now() == before
    False
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._readers: dict[tuple[int, str], Reader] = {}
        self._seen: set[int] = set()
        self._caches: dict[int, Any] = {}  # functions with a memory (functools.cache)
        for module in modules:
            for function in _functions_of(module):
                self._follow(function)

    def now(self) -> list[Any]:
        """Return what all of them are."""
        return [fingerprint(read()) for read in self._readers.values()]

    def changed(self, before: Sequence[Any]) -> str:
        """Return the name of a variable that is another one than it was, if there is any."""
        pairs = zip(self._readers, before, self.now(), strict=True)
        return next((name or "a variable of a closure" for (_, name), one, now in pairs if one != now), "")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Give lists, dicts and sets their content back afterwards, and forget what functions remembered meanwhile."""
        values = [read() for read in self._readers.values()]
        copies = [(one, copy(one)) for one in values if isinstance(one, list | dict | set)]
        sizes = [one.cache_info().currsize for one in self._caches.values()]
        try:
            yield
        finally:
            for one, content in copies:
                one.clear()
                one.extend(content) if isinstance(one, list) else one.update(content)
            for cached, size in zip(self._caches.values(), sizes, strict=True):
                if cached.cache_info().currsize != size:
                    cached.cache_clear()

    def _follow(self, function: Any) -> None:
        if hasattr(function, "cache_info") and hasattr(function, "cache_clear"):
            self._caches[id(function)] = function
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or id(function.__code__) in self._seen or _is_known(function):
            return
        self._seen.add(id(function.__code__))
        names = set(_names_in(function.__code__))
        for cell in function.__closure__ or ():
            self._look(_of_cell(cell), (id(cell), ""), names)
        space = function.__globals__
        for name in names & space.keys():
            self._look(_of_dict(space, name), (id(space), name), names)

    def _look(self, read: Reader, key: tuple[int, str], names: set[str]) -> None:
        value = read()
        if isinstance(value, FunctionType | MethodType) or hasattr(value, "cache_info"):
            self._follow(getattr(value, "__func__", value))
        elif isinstance(value, ModuleType | type):
            if not _is_known(value):
                space = vars(value)
                for name in names & space.keys():
                    if isinstance(space[name], FunctionType) or hasattr(space[name], "cache_info"):
                        self._follow(space[name])
                    elif _is_watched(space[name]):
                        self._readers[id(value), name] = _of_object(value, name)
        elif _is_watched(value):
            self._readers[key] = read


def _is_watched(value: Any) -> bool:
    return type(value) in PLAIN or isinstance(value, Tensor | tuple) or can_change(value)


def _is_known(one: Any) -> bool:
    """Whether something is a library's."""
    name = one.__name__ if isinstance(one, ModuleType) else getattr(one, "__module__", None) or ""
    return name.partition(".")[0] in _LIBRARIES


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the functions that may run when a module is called: its methods and its hooks."""
    for cls in type(module).__mro__:
        if not _is_known(cls):
            for one in vars(cls).values():
                yield getattr(one, "__func__", None) or getattr(one, "fget", None) or one
    yield from (one for one in vars(module).values() if isinstance(one, FunctionType))
    for kind in FORWARD:
        yield from (getattr(one, "__func__", one) for one in vars(module)[kind].values())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _names_in(one)


def _of_dict(space: dict[str, Any], name: str) -> Reader:
    return lambda: space.get(name, _MISSING)


def _of_object(value: Any, name: str) -> Reader:
    return lambda: vars(value).get(name, _MISSING)


def _of_cell(cell: CellType) -> Reader:
    def read() -> Any:
        try:
            return cell.cell_contents
        except ValueError:
            return _MISSING

    return read
