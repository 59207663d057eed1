"""Pickle that also carries functions and classes which the other process cannot import.

A function of a notebook cell, of `__main__` or inside another function travels as its code, with the globals it uses,
its captured variables and its defaults; a class with its attributes. All else travels as pickle does it: by name.

>>> def counter(start):
...     return lambda: start + 1
>>> loads(dumps(counter(41)))()
42

An object that refers to itself is made in two steps: a shell that the rest can refer to, then its content.

    fact = lambda n: n * fact(n - 1)     shell(code) ──► fill(globals = {fact: that shell})

A class keeps its identity: what a rank returns is an instance of the sender's own class, not of a copy.
"""

from __future__ import annotations

import builtins
import enum
import importlib
import io
import linecache
import os
import pickle
import sys
import types
import uuid
from collections.abc import Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from drumline.pipeline.launch.by_name import content_of, global_values, goes_by_name, is_importable, used_submodules
from drumline.pipeline.launch.reducers import REDUCERS
from drumline.pipeline.launch.storages import Storages

_HEAP_TYPE = 1 << 9
_MADE_WITH_THE_CLASS = {"__module__", "__qualname__", "__slots__", "__orig_bases__"}
_NOT_CARRIED = _MADE_WITH_THE_CLASS | {"__dict__", "__weakref__", "_abc_impl"}

# Which class is meant, in every process that it travelled to.
_tokens: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_classes: WeakValueDictionary[str, type] = WeakValueDictionary()
_received: set[str] = set()
_unfilled: set[str] = set()


def dumps(value: Any, *, reply: bool = False) -> list[bytes | memoryview]:
    """Return the parts of a pickle: its stream, then the large buffers (arrays) that it refers to.

    With `reply` it is for the process whose pickle was loaded here: classes that came from there are only named.
    """
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    sources: dict[str, list[str]] = {}
    # The sources are complete only when the value is written, so they stand behind it.
    _Pickler(stream, buffers, sources, reply).dump((value, sources))
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def loads(parts: Sequence[bytes | bytearray | memoryview]) -> Any:
    """Return the value of a pickle made by `dumps`; arrays live in the parts' memory."""
    value, sources = pickle.loads(parts[0], buffers=parts[1:])
    for name, lines in sources.items():
        linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
    return value


class _Pickler(pickle.Pickler):
    def __init__(
        self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer], sources: dict[str, list[str]], reply: bool
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._namespaces: dict[int, _Namespace] = {}
        self._storages = Storages()
        self._sources = sources
        self._reply = reply

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, FunctionType):
            return self._function(obj)
        kind = type(obj)
        if kind.__module__ == "torch.storage":
            return self._storages.reduce(obj)
        reduce = REDUCERS.get(kind)
        return NotImplemented if reduce is None else reduce(obj)

    def _function(self, fn: FunctionType) -> Any:
        if goes_by_name(fn):
            return NotImplemented
        self._keep_source(fn.__code__)
        space = self._namespaces.setdefault(id(fn.__globals__), _Namespace(fn.__globals__))
        used = {} if space.is_importable else global_values(fn)
        cells = fn.__closure__ or ()
        contents = [content_of(cell) for cell in cells]
        modules = [one for one in (*used.values(), *(it[0] for it in contents if it)) if isinstance(one, ModuleType)]
        state = {
            "globals": used,
            "contents": contents,
            "imports": [name for module in modules for name in used_submodules(module, fn.__code__)],
            "attributes": {name: getattr(fn, name) for name in _FUNCTION_ATTRIBUTES if hasattr(fn, name)},
            "dict": fn.__dict__,
        }
        shell = fn.__code__, space, fn.__name__, cells
        return _function_shell, shell, state, None, None, _fill_function

    def _class(self, cls: type) -> Any:
        if not cls.__flags__ & _HEAP_TYPE or goes_by_name(cls):
            return NotImplemented
        token = _token(cls)
        if self._reply and token in _received:
            return _known_class, (token,)
        attributes = dict(vars(cls))
        body = {name: attributes[name] for name in _MADE_WITH_THE_CLASS if name in attributes}
        body["__qualname__"] = cls.__qualname__
        members: dict[str, Any] = {}
        if issubclass(cls, enum.Enum):
            members = {name: member._value_ for name, member in cls.__members__.items()}
            attributes = {name: one for name, one in attributes.items() if _of_enum_body(name, one, members)}
        state = {
            "token": token,
            "attributes": {name: one for name, one in attributes.items() if _is_carried(name, one)},
            "members": {name: dict(vars(getattr(cls, name))) for name in members},
        }
        return (
            _class_shell,
            (token, type(cls), cls.__name__, cls.__bases__, body, members),
            state,
            None,
            None,
            _fill_class,
        )

    def _keep_source(self, code: CodeType) -> None:
        """Carry the lines of a notebook cell along, so that the other process shows them in its tracebacks."""
        name = code.co_filename
        if name not in self._sources and not os.path.exists(name) and (lines := linecache.getlines(name)):
            self._sources[name] = lines


class _Namespace:
    """The globals of some functions: a module's, or a dict that is nobody's."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.name = values.get("__name__", "__main__")
        module = sys.modules.get(self.name)
        self.is_module = module is not None and vars(module) is values
        self.is_importable = self.is_module and is_importable(self.name)

    def __reduce__(self) -> Any:
        return _make_namespace, (self.name, self.is_module, self.is_importable)


def _make_namespace(name: str, is_module: bool, is_importable: bool) -> dict[str, Any]:
    if is_importable:
        return vars(importlib.import_module(name))
    # Without builtins of their own, globals get those of whoever calls, and C code calls without any.
    module = sys.modules.setdefault(name, ModuleType(name)) if is_module else ModuleType(name)
    vars(module).setdefault("__builtins__", builtins)
    return vars(module)


_FUNCTION_ATTRIBUTES = (
    *("__defaults__", "__kwdefaults__", "__annotations__", "__doc__"),
    *("__module__", "__qualname__", "__type_params__"),
)


def _function_shell(code: CodeType, space: dict[str, Any], name: str, cells: tuple[CellType, ...]) -> FunctionType:
    return FunctionType(code, space, name, None, cells)


def _fill_function(fn: FunctionType, state: dict[str, Any]) -> None:
    for name in state["imports"]:
        importlib.import_module(name)
    # What is there already stays: loading never changes a variable of this process's own __main__.
    for name, value in state["globals"].items():
        fn.__globals__.setdefault(name, value)
    for cell, content in zip(fn.__closure__ or (), state["contents"], strict=True):
        if content:
            cell.cell_contents = content[0]
    for name, value in state["attributes"].items():
        setattr(fn, name, value)
    fn.__dict__.update(state["dict"])
    _show_in_main(fn)


def _token(cls: type) -> str:
    token = _tokens.setdefault(cls, uuid.uuid4().hex)
    _classes[token] = cls
    return token


def _known_class(token: str) -> type:
    return _classes[token]


def _is_carried(name: str, one: object) -> bool:
    slot = isinstance(one, types.MemberDescriptorType | types.GetSetDescriptorType)
    return name not in _NOT_CARRIED and not slot


def _of_enum_body(name: str, one: object, members: dict[str, Any]) -> bool:
    """Tell what the author of an enum wrote from what its metaclass added."""
    if name in members or (name.startswith("_") and not name.startswith("__") and name.endswith("_")):
        return False
    return not name.startswith("__") or (isinstance(one, FunctionType) and not goes_by_name(one))


def _class_shell(
    token: str, kind: Any, name: str, bases: tuple[type, ...], body: dict[str, Any], members: dict[str, Any]
) -> type:
    known = _classes.get(token)
    if known is not None:
        return known
    space: Any = kind.__prepare__(name, bases)
    for key, value in (*body.items(), *members.items()):
        space[key] = value
    cls: type = kind(name, bases, space)
    _tokens[cls], _classes[token] = token, cls
    _received.add(token)
    _unfilled.add(token)
    return cls


def _fill_class(cls: type, state: dict[str, Any]) -> None:
    if state["token"] not in _unfilled:
        return
    _unfilled.discard(state["token"])
    for name, value in state["attributes"].items():
        type.__setattr__(cls, name, value)
    for name, values in state["members"].items():
        vars(getattr(cls, name)).update(values)
    _show_in_main(cls)


def _show_in_main(obj: Any) -> None:
    """Let plain pickle and `typing.get_type_hints` find, here too, what stood in the sender's __main__."""
    if obj.__module__ == "__main__" and obj.__name__ == obj.__qualname__ and obj.__name__.isidentifier():
        vars(sys.modules["__main__"]).setdefault(obj.__name__, obj)
