"""Variables outside of a model that its forward may read: globals, and variables captured by functions.

::

    SCALE = 1.0                                     read by name in forward, or in a function that forward calls
    def forward(self, x): return x * SCALE

They are found from the functions' code, without running it. Those of libraries are ignored.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from itertools import compress
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.hooks import FORWARD
from drumline.model.values import MISSING, content_of
from drumline.model.watch.fingerprint import LIBRARIES, PLAIN, Same, can_change, fingerprint, is_settled

Reader = Callable[[], Any]
_OWN_LIBRARIES = LIBRARIES | {"drumline"}
# What is set for all of torch, which a forward may ask for. `torch.get_float32_matmul_precision` raises if both of its
# settings were used.
SETTINGS: dict[str, Reader] = {
    "the default dtype": torch.get_default_dtype,
    "the precision of products on the host": partial(torch._C._get_fp32_precision_getter, "mkldnn", "matmul"),
    "the precision of products on CUDA": partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    "the precision of convolutions": partial(torch._C._get_fp32_precision_getter, "cuda", "conv"),
    "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
    "torch.autograd.set_detect_anomaly": torch.is_anomaly_enabled,
    "the number of threads": torch.get_num_threads,
    "torch.backends.cudnn.enabled": torch._C._get_cudnn_enabled,
    "torch.backends.cudnn.benchmark": torch._C._get_cudnn_benchmark,
    "torch.backends.cudnn.deterministic": torch._C._get_cudnn_deterministic,
    "torch.backends.mkldnn.enabled": torch._C._get_mkldnn_enabled,
    "flash attention": torch._C._get_flash_sdp_enabled,
    "attention that needs little memory": torch._C._get_mem_efficient_sdp_enabled,
    "attention by plain products": torch._C._get_math_sdp_enabled,
    "attention of cuDNN": torch._C._get_cudnn_sdp_enabled,
    "sums in fp16": torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    "sums in bf16": torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
}
_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")  # what can change in a function


class Surroundings:
    """The variables that the code of some modules and functions may read, and their states.

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

    def __init__(self, modules: Iterable[nn.Module], functions: Iterable[Any] = ()) -> None:
        self._readers: dict[tuple[int, str], Reader] = {}
        self._functions: dict[int, FunctionType] = {}  # by their code, as their defaults and attributes are read too
        self._caches: dict[int, Any] = {}  # functions with a memory (functools.cache)
        for module in modules:
            for function in _functions_of(module):
                self._follow(function)
            self._look_at_class(type(module))
        for function in functions:
            self._follow(_plain(function))
        self._names = [function.__name__ for function in self._functions.values()]
        self._names += [name or "a variable of a closure" for _, name in self._readers]
        self._states: list[Any] = []
        self._changing: list[tuple[int, Reader]] = []  # what changes in place: its place among the states
        self._fixed_functions: list[FunctionType] = []  # what can only be replaced
        self._fixed: list[Reader] = []
        self._objects = Same()  # what these two have read

    def now(self) -> list[Any]:
        """Return the states of all of them.

        Most are functions, classes and numbers, which can only be replaced. As long as none is, only the states of
        the others are taken: a look at a thousand variables of a library costs little more than reading them.
        """
        if not self._states or self._fixed_objects() != self._objects:
            self._take_all()
        states: dict[int, Any] = {}  # by identity: modules import the same tables from each other
        for at, read in self._changing:
            value = read()
            if id(value) not in states:
                states[id(value)] = value, fingerprint(value, name=self._names[at])
            self._states[at] = states[id(value)][1]
        return self._states.copy()

    def _take_all(self) -> None:
        """Take every state, and sort out which of them change in place."""
        functions = [*self._functions.values()]
        readers: list[Reader] = [*(partial(_PARTS, function) for function in functions), *self._readers.values()]
        values = [read() for read in readers]
        self._states = [fingerprint(value, name=name) for name, value in zip(self._names, values, strict=True)]
        settled = [*map(is_settled, map(_inside, functions)), *map(is_settled, values[len(functions) :])]
        self._fixed_functions = [*compress(functions, settled)]
        self._fixed = [*compress(readers, settled)][len(self._fixed_functions) :]
        self._changing = [(at, read) for at, read in enumerate(readers) if not settled[at]]
        self._objects = self._fixed_objects()

    def _fixed_objects(self) -> Same:
        objects = Same(read() for read in self._fixed)
        for function in self._fixed_functions:
            objects += _inside(function)
        return objects

    def variables(self) -> list[tuple[Any, Callable[[Any], None]]]:
        """Return the value of each of them, with a function that sets it where the code may have set another."""
        functions = [(parts, _nothing) for parts in map(_PARTS, self._functions.values())]
        return [*functions, *((read(), _setter(read)) for read in self._readers.values())]

    def named(self) -> list[tuple[str, Any, Callable[[Any], None]]]:
        """Return every variable's name and value, with a function that gives it another."""
        names = self._names[len(self._functions) :]
        return [(name, read(), _setter(read)) for name, read in zip(names, self._readers.values(), strict=True)]

    def changed(self, before: Sequence[Any]) -> str:
        """Return the name of a variable that has changed, if any."""
        states = zip(self._names, before, self.now(), strict=True)
        return next((name for name, then, now in states if then != now), "")

    @contextmanager
    def keeping_contents(self) -> Iterator[Callable[[], None]]:
        """Restore the contents of lists, dicts and sets afterwards, and clear function caches, as what is given does.

        A cache in which nothing is new is left alone.
        """
        values = [read() for read in self._readers.values()]
        copies = [(value, copy(value)) for value in values if isinstance(value, list | dict | set)]
        fills = {at: _fill(cache) for at, cache in self._caches.items()}

        def clear() -> None:
            for at, cache in self._caches.items():
                if at not in fills or _fill(cache) != fills[at]:
                    cache.cache_clear()
                    fills.pop(at, None)  # its counts begin anew

        try:
            yield clear
        finally:
            for row, content in copies:
                row.clear()
                row.extend(content) if isinstance(row, list) else row.update(content)
            clear()

    def _follow(self, function: Any) -> None:
        if _has_memory(function):
            self._caches[id(function)] = function
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or id(function.__code__) in self._functions or is_known(function):
            return
        self._functions[id(function.__code__)] = function
        names = set(_names_in(function.__code__))
        if names & {"environ", "getenv", "environb"}:
            self._readers[id(os.environ), "os.environ"] = lambda: dict(os.environ)
        for name in names & sys.modules.keys():  # imported where it runs
            self._look(partial(sys.modules.get, name), (id(sys.modules), name), names)
        for cell in function.__closure__ or ():
            self._look(partial(content_of, cell), (id(cell), ""), names)
        space = function.__globals__
        for name in names & space.keys():
            self._look(partial(space.get, name, MISSING), (id(space), name), names)

    def _look_at_class(self, kind: type) -> None:
        """Find values of a module's class that its functions may read by `type(self)`."""
        for cls in kind.__mro__:
            if not is_known(cls) and (id(cls), "") not in self._readers:
                self._readers[id(cls), ""] = partial((cls,).__getitem__, 0)
                functions = (_plain(item) for item in vars(cls).values())
                code = [item.__code__ for item in functions if isinstance(item, FunctionType)]
                for name in {name for each in code for name in _names_in(each)} & vars(cls).keys():
                    if not hasattr(type(vars(cls)[name]), "__get__") and _is_watched(vars(cls)[name]):
                        self._readers[id(cls), name] = partial(vars(cls).get, name, MISSING)

    def _look(self, read: Reader, key: tuple[int, str], names: set[str]) -> None:
        value = read()
        if isinstance(value, FunctionType | MethodType) or _has_memory(value):
            self._follow(_plain(value))
            self._readers[key] = read
        elif isinstance(value, ModuleType | type):
            if isinstance(value, type) or not is_known(value):
                self._readers[key] = read
            if not is_known(value):
                space = vars(value)
                for name in names & space.keys():
                    item = _plain(space[name])
                    is_code = isinstance(item, FunctionType) or _has_memory(item)
                    if is_code:
                        self._follow(item)
                    if is_code or _is_watched(space[name]):
                        self._readers[id(value), name] = partial(space.get, name, MISSING)
        elif _is_watched(value):
            self._readers[key] = read


def _has_memory(value: Any) -> bool:
    """Whether a function keeps what it returned (functools.cache).

    Only its type and its own attributes are asked: some objects answer to any name, by code of their own.
    """
    own_entries = vars(value) if isinstance(value, FunctionType) else {}
    return all(hasattr(type(value), name) or name in own_entries for name in ("cache_info", "cache_clear"))


def _fill(cache: Any) -> Any:
    """Return what is another once a cache has something new, even in the place of something old."""
    info = cache.cache_info()
    return getattr(info, "misses", None), info.currsize


def _plain(value: Any) -> Any:
    """Return the function of a method."""
    return value.__func__ if isinstance(value, MethodType | staticmethod | classmethod) else value


def _inside(function: FunctionType) -> tuple[Any, ...]:
    """Return a function's parts, and what is in those that are tables."""
    parts: tuple[Any, ...] = function.__code__, function.__defaults__
    for table in (function.__kwdefaults__, function.__dict__):
        if table:
            parts += (*table, *table.values())
    return parts


def _nothing(value: Any) -> None:
    """Set nothing: a function's parts are restored by what they hold."""


def _setter(read: Reader) -> Callable[[Any], None]:
    """Return a function that gives a variable a value again: a global one, or one of a closure."""

    def put(value: Any) -> None:
        if not isinstance(read, partial) or value is MISSING or read() is value:
            return
        place = read.args[0]
        if read.func is content_of:
            place.cell_contents = value
        elif isinstance(space := getattr(read.func, "__self__", None), dict) and space is not sys.modules:
            space[place] = value

    return put


def _is_watched(value: Any) -> bool:
    is_plain = type(value) in PLAIN or isinstance(value, Tensor | tuple)
    return is_plain or callable(value) or hasattr(type(value), "__next__") or can_change(value)


def is_known(thing: Any) -> bool:
    """Whether a module, class or function belongs to a library."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or ""
    return name.partition(".")[0] in _OWN_LIBRARIES


def is_of_a_library(module: str) -> bool:
    """Whether a module of this name belongs to a library.

    >>> is_of_a_library("torch.nn"), is_of_a_library("__main__")
    (True, False)
    """
    return module.partition(".")[0] in _OWN_LIBRARIES


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the functions that may run when a module is called: its methods and its hooks."""
    for cls in type(module).__mro__:
        if not is_known(cls):
            for attribute in vars(cls).values():
                yield getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute
    yield from (function for function in vars(module).values() if isinstance(function, FunctionType))
    for kind in FORWARD:
        yield from (getattr(attribute, "__func__", attribute) for attribute in vars(module)[kind].values())


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
