"""Where code keeps something outside of a module's attributes, found from the code without running it.

    CALLS                          a global, or an attribute of an imported module
    type(self).calls               an attribute of a class
    nonlocal calls                 a variable of a closure, of hooks too
    note.calls, def f(x, seen=[])  an attribute of a function, a default argument
    CALLS.set(...)                 a context variable

Also found: modules that no module has registered, in a list for example. Libraries are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextvars import ContextVar
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

from torch import Tensor, nn

from drumline.model.hooks import BACKWARD, FORWARD
from drumline.model.kept_state.code import facts_of
from drumline.model.kept_state.contents import items_of, kind_of
from drumline.model.values import MISSING, content_of
from drumline.model.watch.fingerprint import PLAIN
from drumline.model.watch.surroundings import is_known
from drumline.model.watch.used_up import can_be_used_up

_CODE = (FunctionType, MethodType, BuiltinFunctionType, type, ModuleType, property, staticmethod, classmethod)
_PARAMETER_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_MOST, _MOST_ITEMS = 16384, 4096


class Place(NamedTuple):
    """A variable outside of modules, and how to read and set it."""

    key: tuple[int, str]  # the same wherever it is found
    label: str
    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


class Outside(MutableMapping[Place, Any]):
    """Variables outside of modules, as if they were a module's attributes; those that are not set are MISSING."""

    def __init__(self, places: Iterable[Place]) -> None:
        self.places = list(places)

    def __getitem__(self, place: Place) -> Any:
        return place.read()

    def __setitem__(self, place: Place, value: Any) -> None:
        if place.read() is not value:
            place.write(value)

    def __delitem__(self, place: Place) -> None:
        raise AssertionError("a variable that is not set is MISSING")

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    def copy(self) -> dict[Place, Any]:
        """Return what they hold."""
        return {place: place.read() for place in self.places}


class CodeWalk:
    """Goes from modules through all that their code can reach."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules: dict[int, nn.Module] = {id(module): module for module in modules}
        self.hidden: dict[int, tuple[nn.Module, str]] = {}  # with the attribute that leads to each
        self.functions: dict[int, FunctionType] = {}
        self._seen_values: dict[int, Any] = {}
        self._holders: dict[int, Any] = {}  # classes, functions and Python modules that code names
        self._found_places: dict[tuple[int, str], Place] = {}
        self._stored, self._read = set[str](), set[str]()
        self._spaces: dict[int, tuple[dict[str, Any], set[str], set[str]]] = {}  # globals, names read, and set
        self._via = ""
        for module in list(self.modules.values()):
            self._module(module)
        self.places = list(self._places())

    @property
    def reads(self) -> frozenset[tuple[int, str]]:
        """All variables that code names, also those that its own code cannot change."""
        globals_read = {(id(space), name) for space, read, _ in self._spaces.values() for name in read}
        attributes = {(at, name) for at, holder in self._holders.items() for name in self._read & vars(holder).keys()}
        cells = {(id(cell), "") for function in self.functions.values() for cell in function.__closure__ or ()}
        return frozenset(globals_read | attributes | cells)

    def _module(self, module: nn.Module) -> None:
        self._class(type(module))
        space = vars(module)
        for table in (*FORWARD, *BACKWARD):
            for hook in space.get(table, {}).values():
                self._value(hook)
        for hook in hooks_of_parameters(module):
            self._value(hook)
        if not is_known(type(module)):
            for name, value in list(space.items()):
                if type(value) not in PLAIN and name not in _TORCHS_OWN:
                    self._via = name
                    self._value(value)
        elif "forward" in space:
            self._value(space["forward"])

    def _value(self, value: Any) -> None:
        waiting = [value]
        while waiting and len(self._seen_values) < _MOST:
            each = waiting.pop()
            if not isinstance(each, (*PLAIN, Tensor)) and id(each) not in self._seen_values:
                self._seen_values[id(each)] = each
                waiting += self._opened(each)

    def _opened(self, value: Any) -> Iterable[Any]:
        """Take note of a value, and return what else to look at."""
        if isinstance(value, nn.Module):
            self._hide(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, ContextVar):
            self._variable(value)
            return [value.get(None)]
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            if not is_known(value):
                self._holders[id(value)] = value
        else:
            return self._inside(value)
        return ()

    def _inside(self, value: Any) -> Iterable[Any]:
        if isinstance(value, MethodType):
            return [value.__func__, value.__self__]
        if isinstance(value, partial):
            return [value.func, *value.args, *value.keywords.values()]
        if isinstance(value, ref):
            return [value()]
        if isinstance(value, tuple | frozenset):
            return value
        if callable(value) and hasattr(value, "__wrapped__"):
            return [value.__wrapped__]
        kind = kind_of(value)
        if kind is None:
            return ()
        self._class(type(value))
        state = kind.take(value) if kind.holds_objects else ()
        return items_of(state) if len(state) <= _MOST_ITEMS else ()

    def _variable(self, variable: ContextVar[Any]) -> None:
        key, label = (id(variable), ""), f"context variable {variable.name!r}"
        read, write = partial(variable.get, MISSING), partial(_set_variable, variable)
        self._found_places[key] = Place(key, label, variable.name, read, write)

    def _hide(self, module: nn.Module) -> None:
        via = self._via
        for part in module.modules():
            if id(part) not in self.modules:
                self.modules[id(part)] = part
                self.hidden[id(part)] = part, via
                self._module(part)
                self._via = via

    def _class(self, cls: type) -> None:
        for kind in cls.__mro__:
            if not is_known(kind) and id(kind) not in self._holders:
                self._holders[id(kind)] = kind
                for attribute in vars(kind).values():
                    self._value(getattr(attribute, "__func__", None) or getattr(attribute, "fget", None) or attribute)
                    if isinstance(attribute, property):
                        self._value(attribute.fset)

    def _function(self, function: FunctionType) -> None:
        if is_known(function):
            return
        self.functions[id(function)] = function
        facts = facts_of(function.__code__)
        self._stored |= facts.stored
        self._read |= facts.names
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = content_of(cell)
            if name in facts.stored or may_hold(value) or _is_set_elsewhere(cell):
                key = id(cell), ""
                label = f"variable {name!r} of a closure"
                self._found_places[key] = Place(key, label, name, partial(content_of, cell), partial(_set_cell, cell))
            self._value(value)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(value)
        for at, value in enumerate(function.__defaults__ or ()):
            if may_hold(value):
                self._add_default(function, at)
        if vars(function):
            self._holders[id(function)] = function
        space, read, stored = self._spaces.setdefault(id(function.__globals__), (function.__globals__, set(), set()))
        read |= facts.names & space.keys()
        stored |= facts.stored
        for name in facts.names & space.keys():
            if type(space[name]) not in PLAIN:
                self._value(space[name])
                if isinstance(space[name], FunctionType) and not is_known(space[name]):
                    self._holders[id(space[name])] = space[name]

    def _add_default(self, function: FunctionType, at: int) -> None:
        code = function.__code__
        assert function.__defaults__ is not None
        name = code.co_varnames[code.co_argcount - len(function.__defaults__) + at]
        key = id(function), name
        label = f"default argument {name!r} of {function.__name__!r}"
        read, write = partial(_default, function, at), partial(_set_default, function, at)
        self._found_places[key] = Place(key, label, name, read, write)

    def _places(self) -> Iterator[Place]:
        yield from self._found_places.values()
        for space, read, stored in self._spaces.values():
            for name in sorted(read | stored):
                if name in stored or may_hold(space[name]):
                    key = id(space), name
                    yield Place(
                        key,
                        f"global {name!r}",
                        name,
                        partial(space.get, name, MISSING),
                        partial(_set_item, space, name),
                    )
        for holder in self._holders.values():
            what = "class" if isinstance(holder, type) else "function" if isinstance(holder, FunctionType) else "module"
            for name in sorted(self._names_of(holder)):
                value = vars(holder).get(name, MISSING)
                is_code = isinstance(value, _CODE) or hasattr(type(value), "__get__")
                if not is_code and (name in self._stored or may_hold(value)):
                    label = f"attribute {name!r} of {what} {holder.__name__!r}"
                    reader = partial(_attribute, holder, name)
                    yield Place((id(holder), name), label, name, reader, partial(_set_attribute, holder, name))

    def _names_of(self, holder: Any) -> set[str]:
        """Return the attributes of a class, a function or a Python module that code may set or that may change."""
        names = {name for name in vars(holder) if not name.startswith("__")}
        if isinstance(holder, ModuleType):
            return names & self._read
        if isinstance(holder, type):
            own_functions = [function for function in vars(holder).values() if isinstance(function, FunctionType)]
            facts = [facts_of(function.__code__) for function in own_functions]
            if any(fact.names & {"type", "__class__", holder.__name__} for fact in facts):
                names = names.union(*(fact.stored for fact in facts))
        return names


_TORCHS_OWN = frozenset(vars(nn.Module()))


def hooks_of_parameters(module: nn.Module) -> list[Any]:
    """Return the hooks on gradients of a module's own parameters.

    >>> layer = nn.Linear(1, 1); handle = layer.weight.register_hook(print)
    >>> hooks_of_parameters(layer)
    [<built-in function print>]
    """
    parameters = [param for param in module._parameters.values() if param is not None]
    tables = [getattr(param, name, None) for param in parameters for name in _PARAMETER_HOOKS]
    return [hook for table in tables if table for hook in table.values()]


def may_hold(value: Any) -> bool:
    """Whether something in a value may change, or an iterator be used up, while the value stays the same object.

    >>> may_hold(1), may_hold([1]), may_hold((1, 2)), may_hold(iter([1]))
    (False, True, False, True)
    """
    if isinstance(value, tuple | frozenset):
        return any(map(may_hold, value))
    if isinstance(value, ref):
        return may_hold(value())
    return isinstance(value, Tensor) or can_be_used_up(value) or kind_of(value) is not None


def _is_set_elsewhere(cell: CellType) -> bool:
    """Whether another function may set a variable: a number that only one function reads may change, too."""
    return not isinstance(content_of(cell), (*_CODE, nn.Module))


def _default(function: FunctionType, at: int) -> Any:
    return (function.__defaults__ or ())[at]


def _set_default(function: FunctionType, at: int, value: Any) -> None:
    defaults = list(function.__defaults__ or ())
    defaults[at] = value
    function.__defaults__ = tuple(defaults)


def _set_variable(variable: ContextVar[Any], value: Any) -> None:
    if value is not MISSING:
        variable.set(value)


def _set_cell(cell: CellType, value: Any) -> None:
    if value is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def _set_item(space: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        space.pop(name, None)
    else:
        space[name] = value


def _attribute(holder: Any, name: str) -> Any:
    return vars(holder).get(name, MISSING)


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    if value is not MISSING:
        setattr(holder, name, value)
    elif name in vars(holder):
        delattr(holder, name)
