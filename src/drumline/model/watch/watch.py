"""Check before every step whether everything that a cut model depends on besides its inputs is unchanged.

    modes, hooks, what is frozen, attributes and variables that the forward reads between blocks     traced again
    another buffer in place of one used between blocks                                                adopted
    another module in place of one, another parameter                                                 refused

The modules are those of the user's model, as long as it lives: a model that is gone no longer changes.

Variables outside a model that its forward may read are globals, and variables captured by functions:

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
from operator import attrgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.catalogue import whole_name
from drumline.model.hooks import BACKWARD, FORWARD
from drumline.model.values import MISSING, content_of
from drumline.model.watch.fingerprint import LIBRARIES, PLAIN, Same, can_change, fingerprint

Reader = Callable[[], Any]
AttributeName = tuple[str, str]  # the names of a module and of its attribute
_LIBRARIES = LIBRARIES | {"drumline"}


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
        self._seen: set[int] = set()
        self._caches: dict[int, Any] = {}  # functions with a memory (functools.cache)
        for module in modules:
            for function in _functions_of(module):
                self._follow(function)
        for function in functions:
            self._follow(_plain(function))

    def now(self) -> list[Any]:
        """Return the states of all of them."""
        return [fingerprint(read()) for read in self._readers.values()]

    def variables(self) -> list[tuple[Any, Callable[[Any], None]]]:
        """Return the value of each of them, with a function that sets it where the code may have set another."""
        return [(read(), _setter(read)) for read in self._readers.values()]

    def changed(self, before: Sequence[Any]) -> str:
        """Return the name of a variable that has changed, if any."""
        pairs = zip(self._readers, before, self.now(), strict=True)
        return next((name or "a variable of a closure" for (_, name), value, now in pairs if value != now), "")

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore the contents of lists, dicts and sets afterwards, and clear function caches."""
        values = [read() for read in self._readers.values()]
        copies = [(value, copy(value)) for value in values if isinstance(value, list | dict | set)]
        sizes = [cache.cache_info().currsize for cache in self._caches.values()]
        try:
            yield
        finally:
            for row, content in copies:
                row.clear()
                row.extend(content) if isinstance(row, list) else row.update(content)
            for cached, size in zip(self._caches.values(), sizes, strict=True):
                if cached.cache_info().currsize != size:
                    cached.cache_clear()

    def _follow(self, function: Any) -> None:
        if _has_memory(function):
            self._caches[id(function)] = function
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or id(function.__code__) in self._seen or is_known(function):
            return
        self._seen.add(id(function.__code__))
        names = set(_names_in(function.__code__))
        self._readers[id(function), function.__name__] = _of_function(function)
        if names & {"environ", "getenv", "environb"}:
            self._readers[id(os.environ), "os.environ"] = lambda: dict(os.environ)
        for name in names & sys.modules.keys():  # imported where it runs
            self._look(partial(sys.modules.get, name), (id(sys.modules), name), names)
        for cell in function.__closure__ or ():
            self._look(partial(content_of, cell), (id(cell), ""), names)
        space = function.__globals__
        for name in names & space.keys():
            self._look(partial(space.get, name, MISSING), (id(space), name), names)

    def _look(self, read: Reader, key: tuple[int, str], names: set[str]) -> None:
        value = read()
        if isinstance(value, FunctionType | MethodType) or _has_memory(value):
            self._follow(_plain(value))
            self._readers[key] = read
        elif isinstance(value, ModuleType | type):
            if not is_known(value):
                self._readers[key] = read
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
    own = vars(value) if isinstance(value, FunctionType) else {}
    return all(hasattr(type(value), name) or name in own for name in ("cache_info", "cache_clear"))


def _plain(value: Any) -> Any:
    """Return the function of a method."""
    return value.__func__ if isinstance(value, MethodType | staticmethod | classmethod) else value


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
    return type(value) in PLAIN or isinstance(value, Tensor | tuple) or can_change(value)


def is_known(thing: Any) -> bool:
    """Whether a module, class or function belongs to a library."""
    name = thing.__name__ if isinstance(thing, ModuleType) else getattr(thing, "__module__", None) or ""
    return name.partition(".")[0] in _LIBRARIES


def _functions_of(module: nn.Module) -> Iterator[Any]:
    """Yield the functions that may run when a module is called: its methods and its hooks."""
    for cls in type(module).__mro__:
        if not is_known(cls):
            for attribute in vars(cls).values():
                yield getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute
    yield from (function for function in vars(module).values() if isinstance(function, FunctionType))
    for kind in FORWARD:
        yield from (getattr(attribute, "__func__", attribute) for attribute in vars(module)[kind].values())


def code_of(module: nn.Module) -> list[Any]:
    """Return the functions of a module, its own and those of its classes, without libraries' functions."""
    kind = type(module)
    found: list[Any] = [kind]
    found += [function for function in vars(module).values() if isinstance(function, FunctionType | MethodType)]
    for cls in kind.__mro__:
        if not is_known(cls):
            found += [attribute for attribute in vars(cls).values() if not isinstance(attribute, PLAIN)]
    return [Same(found), *[fingerprint(tensor) for tensor in found if isinstance(tensor, Tensor)]]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


_PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__", "__dict__")


def _of_function(function: FunctionType) -> Reader:
    """Return a reader of what can change in a function: its code, its defaults and its attributes."""
    return partial(_PARTS, function)


_HOOKS = (*FORWARD, *BACKWARD)
_GLOBAL: list[dict[int, Any]] = [getattr(nn.modules.module, f"_global{kind}") for kind in _HOOKS]

Table = dict[str, Tensor | None]


def global_hooks() -> list[Any]:
    """Return which hooks run on all modules.

    >>> global_hooks() == global_hooks()
    True
    """
    return [len(entry) and list(entry) for entry in _GLOBAL]


class Watch:
    """A model's modules and their states; `inside` are those traced inside, whose code is checked too.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> watch = Watch(model.named_modules(), frozenset({""}))
    >>> watch.has_changed(), model[1].eval().training, watch.has_changed(), watch.has_changed()
    (False, False, True, False)
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], inside: frozenset[str]) -> None:
        self._modules = [(name, ref(module)) for name, module in modules]
        self._inside = inside
        self._children = [(name, seen, _children(module)) for name, seen, module in self._alive()]
        self._surroundings = self._around()
        self._places: dict[AttributeName, ref[nn.Module]] = {}
        self._before = self._now()
        self._tables: list[tuple[str, ref[nn.Module], Table, Table]] = []

    def _alive(self) -> list[tuple[str, ref[nn.Module], nn.Module]]:
        return [(name, seen, module) for name, seen in self._modules if (module := seen()) is not None]

    def read(self, places: Iterable[AttributeName]) -> None:
        """Also check these attributes, on which the trace depends."""
        named = {name: seen for name, seen in self._modules if name in {place[0] for place in places}}
        self._places.update((place, named[place[0]]) for place in places if place[0] in named)
        modes, _ = self._before  # an evaluation has others while it lasts
        self._before = modes, self._now()[1]

    def begin(self) -> None:
        """Record the current parameters and buffers between blocks as the expected ones."""
        self._tables = [
            (name, seen, dict(module._parameters), dict(module._buffers))
            for name, seen, module in self._alive()
            if name in self._inside
        ]

    def has_changed(self) -> bool:
        """Whether anything has changed since the last call; refuse replaced modules."""
        self.refuse_exchanged()
        before, self._before = self._before, self._now()
        if before == self._before:
            return False
        self._surroundings = self._around()  # other code may read other variables
        self._before = self._now()
        return True

    def _around(self) -> Surroundings:
        return Surroundings(module for name, _, module in self._alive() if name in self._inside)

    def _now(self) -> tuple[list[bool], list[Any]]:
        """Return the modules' modes, and all else that is looked after."""
        modes: list[bool] = []
        found: list[Any] = global_hooks()
        alive = self._alive()
        found += [code_of(module) for name, _, module in alive if name in self._inside]
        for _, _, module in alive:
            own = module.__dict__
            modes.append(own["training"])
            found += [(kind, list(own[kind])) for kind in _HOOKS if own[kind]]
            if own["_parameters"]:
                found.append([param is not None and param.requires_grad for param in own["_parameters"].values()])
        for (_, key), seen in self._places.items():
            owner = seen()
            if owner is not None:
                own = owner.__dict__
                found.append(fingerprint(own[key] if key in own else _of_class(owner, key)))
        return modes, found + self._surroundings.now()

    def refuse_exchanged(self) -> None:
        """Refuse modules that were replaced, added or removed."""
        for name, seen, before in self._children:
            module = seen()
            if module is None:
                continue
            children = module.__dict__["_modules"]
            now = [(key, id(child)) for key, child in children.items()] if children else []
            if now == before:
                continue
            keys = [key for key in {**dict(before), **dict(now)} if dict(before).get(key) != dict(now).get(key)]
            whole = whole_name(name, keys[0])
            raise ModelError(
                f"the module {whole!r} was replaced, added or removed after the pipeline was created",
                expected="the modules with which the model was cut",
                fix="create a new pipeline",
            )

    def exchanged(self) -> list[tuple[str, Tensor]]:
        """Return the buffers between blocks that were replaced by another tensor; refuse replaced parameters."""
        found = []
        for at, (name, seen, parameters, buffers) in enumerate(self._tables):
            module = seen()
            if module is None:
                continue
            for key, param in module._parameters.items():
                if param is not parameters.get(key):
                    raise ModelError(
                        f"the parameter {whole_name(name, key)!r} was replaced after the pipeline was created",
                        expected="the original parameter, because the forward uses it between blocks",
                        fix="change it in place, use load_state_dict, or create a new pipeline",
                    )
            new = [(key, buffer) for key, buffer in module._buffers.items() if buffer is not buffers.get(key)]
            if new:
                found += [(whole_name(name, key), tensor) for key, tensor in new if tensor is not None]
                self._tables[at] = (name, seen, parameters, dict(module._buffers))
        return found


def _children(module: nn.Module) -> list[tuple[str, int]]:
    return [(key, id(layer)) for key, layer in module.__dict__["_modules"].items()]


def _of_class(module: nn.Module, key: str) -> Any:
    """Return an attribute of a module's class without running any code: a plain one."""
    for cls in type(module).__mro__:
        if key in cls.__dict__:
            value = cls.__dict__[key]
            return value if type(value) in PLAIN else MISSING
    return MISSING


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has its own hooks.

    >>> has_hooks(nn.ReLU())
    False
    """
    return any(vars(module)[kind] for kind in _HOOKS)


def refuse_hooks(root: nn.Module) -> None:
    """Refuse hooks on an nn.Sequential whose blocks run one by one, without it."""
    if any(map(vars(root).get, _HOOKS)):
        raise ModelError(
            "the model is an nn.Sequential with its own hooks, which no stage would run",
            expected="hooks on its blocks, or an example with which to trace the model, hooks included",
            fix="register the hook on a block, or pass example= to Pipeline",
        )
