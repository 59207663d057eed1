"""Pickle functions and classes that the other process cannot import.

A function from a notebook cell, from `__main__` or inside another function is sent as its code, with the globals it
uses, its captured variables and its defaults. A class is sent with its attributes. All else is pickled by name.

>>> def counter(start):
...     return lambda: start + 1
>>> loads(dumps(counter(41)))()
42

cloudpickle does this for functions and classes; without it, they must be importable. This module adds what cloudpickle
loses: variables shared by two closures, slots, enums as their authors wrote them, caches, the globals of a class inside
a function, and `__main__`. A class keeps its identity: what a rank returns is an instance of the sender's class, not of
a copy.
"""

from __future__ import annotations

import builtins
import copyreg
import dataclasses
import enum
import functools
import importlib
import io
import linecache
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from drumline.channel.launch.by_name import codes, content_of, global_values, goes_by_name, is_importable
from drumline.core.errors import LaunchError

try:
    from cloudpickle import cloudpickle
except ImportError:
    cloudpickle = None

_Base: Any = cloudpickle.Pickler if cloudpickle else pickle.Pickler
_HEAP_TYPE = 1 << 9
_SMALL_BYTES = 4096  # smaller buffers stay in the stream

# Classes from other processes, by cloudpickle's name for each; those of the second set lack their attributes.
_received: set[str] = set()
_unfilled: set[str] = set()


def dumps(value: Any, *, reply: bool = False) -> list[bytes | memoryview]:
    """Return the parts of a pickle: its stream, then the large buffers (arrays) that it refers to.

    With `reply`, it is for the process whose pickle was loaded here: classes from there are sent by name only.
    """
    stream, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    sources: dict[str, list[str]] = {}
    # The sources are complete only after the value is written, so they follow it.
    _Pickler(stream, buffers, sources, reply).dump((value, sources))
    return [stream.getbuffer(), *(buffer.raw() for buffer in buffers)]


def loads(parts: Sequence[bytes | bytearray | memoryview]) -> Any:
    """Return the value of a pickle made by `dumps`; arrays use the memory of the parts."""
    value, sources = pickle.loads(parts[0], buffers=parts[1:])
    for name, lines in sources.items():
        linecache.cache.setdefault(name, (sum(map(len, lines)), None, lines, name))
    return value


def _module(module: ModuleType) -> Any:
    known = module.__name__ == "__main__" or is_importable(module.__name__)
    if sys.modules.get(module.__name__) is not module or not known:
        raise pickle.PicklingError(f"module {module.__name__} cannot be imported by its name")
    return importlib.import_module, (module.__name__,)


def _cached(fn: Any) -> Any:
    if goes_by_name(fn):
        return fn.__qualname__
    return _make_cached, (fn.__wrapped__, fn.cache_parameters())


def _make_cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


# Dataclasses compare their sentinels by identity, so these are sent by name.
_SENTINELS: dict[Any, str] = {
    getattr(dataclasses, name): name for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")
}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    ModuleType: _module,
    CellType: lambda _: (cloudpickle._make_empty_cell, ()),  # its functions fill it, because it may hold one of them
    functools.cached_property: lambda one: (functools.cached_property, (one.func,), {"attrname": one.attrname}),
    type(functools.lru_cache(len)): _cached,
    **dict.fromkeys(map(type, _SENTINELS), _SENTINELS.__getitem__),
}


class _Pickler(_Base):  # type: ignore[misc]
    dispatch_table: ClassVar[Any] = ChainMap(
        _REDUCERS, cloudpickle.Pickler.dispatch_table if cloudpickle else copyreg.dispatch_table
    )

    def __init__(
        self, stream: io.BytesIO, buffers: list[pickle.PickleBuffer], sources: dict[str, list[str]], reply: bool
    ) -> None:
        super().__init__(stream, protocol=5, buffer_callback=buffers.append)
        self._namespaces: dict[int, _Namespace] = {}
        self._sources = sources
        self._reply = reply

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, type | FunctionType):
            return self._storage(obj) if type(obj).__module__ == "torch.storage" else NotImplemented
        if goes_by_name(obj):
            return NotImplemented
        if isinstance(obj, type) and not obj.__flags__ & _HEAP_TYPE:  # created by C code, such as the type of None
            return NotImplemented if cloudpickle is None else super().reducer_override(obj)
        if cloudpickle is None:
            raise LaunchError(
                f"the ranks cannot import {obj.__qualname__} from {obj.__module__}, and cloudpickle is not installed",
                fix="move it to a module that the ranks can import, or install cloudpickle, which sends its code",
            )
        return self._class(obj) if isinstance(obj, type) else self._function(obj)

    def _function(self, fn: FunctionType) -> Any:
        self._keep_source(fn.__code__)
        space = self._namespaces.setdefault(id(fn.__globals__), _Namespace(fn.__globals__))
        contents = [content_of(cell) for cell in fn.__closure__ or ()]
        values = [*global_values(fn).values(), *(value for content in contents for value in content)]
        make, _, (own, slots), *_ = self._dynamic_function_reduce(fn)
        slots |= {
            "__closure__": None,
            "__globals__": {},
            "__type_params__": getattr(fn, "__type_params__", ()),
            "_cloudpickle_submodules": [
                module.__name__
                for code in codes(fn.__code__)
                for module in cloudpickle._find_imported_submodules(code, values)
                if is_importable(module.__name__)
            ],
        }
        used = {} if space.is_importable else global_values(fn)
        shell = fn.__code__, space, fn.__name__, None, fn.__closure__
        return make, shell, (own, slots, used, contents), None, None, _fill_function

    def _class(self, cls: type) -> Any:
        token = cloudpickle._get_or_create_tracker_id(cls)
        if self._reply and token in _received:
            return _known_class, (token,)
        make, args, (attributes, _), *_ = cloudpickle._dynamic_class_reduce(cls)
        attributes = {name: value for name, value in vars(cls).items() if name in attributes.keys() - {"_abc_impl"}}
        members: dict[str, Any] = {}
        if issubclass(cls, enum.Enum):
            members = {name: dict(vars(member)) for name, member in cls.__members__.items()}
            attributes = {name: value for name, value in attributes.items() if _of_enum_body(name, value, members)}
            args = *args[:3], {name: member["_value_"] for name, member in members.items()}, *args[4:]
        else:
            body = {name: vars(cls)[name] for name in ("__slots__", "__orig_bases__") if name in vars(cls)}
            args = *args[:2], cls.__bases__, {**args[3], **body, "__qualname__": cls.__qualname__}, *args[4:]
        return _class_shell, (token, make, args), (token, attributes, members), None, None, _fill_class

    def _storage(self, storage: Any) -> Any:
        """Write CPU memory as buffers next to the stream; two views of one memory stay two views.

        torch pickles a tensor as its storage and layout, and a storage as a file within the pickle, which copies it
        three times. Only the storage is handled differently here.
        """
        import torch

        untyped: Any = getattr(storage, "_untyped_storage", storage)
        if untyped.device.type != "cpu":
            return NotImplemented
        if isinstance(storage, torch.UntypedStorage):
            data: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            return _untyped, (data.tobytes() if data.nbytes < _SMALL_BYTES else pickle.PickleBuffer(data),)
        if isinstance(storage, torch.storage.TypedStorage):
            kind: Any = torch.storage.TypedStorage
            return functools.partial(kind, wrap_storage=untyped, dtype=storage.dtype, _internal=True), ()
        return NotImplemented

    def _keep_source(self, code: CodeType) -> None:
        """Send the source lines of a notebook cell along, so that the other process shows them in tracebacks."""
        name = code.co_filename
        if name in self._sources or os.path.exists(name):
            return
        with suppress(IndexError):  # of a doctest, which has linecache look among the examples of the running test
            if lines := linecache.getlines(name):
                self._sources[name] = lines


class _Namespace:
    """The globals of some functions: those of a module, or a separate dict."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.name = values.get("__name__", "__main__")
        module = sys.modules.get(self.name)
        self.is_module = module is not None and vars(module) is values
        self.is_importable = self.is_module and is_importable(self.name)

    def __reduce__(self) -> Any:
        return _make_namespace, (self.name, self.is_module, self.is_importable)


def _make_namespace(name: str, is_module: bool, is_importable: bool) -> dict[str, Any]:
    if is_importable:
        return vars(importlib.import_module(name))
    # Globals without builtins would use those of the caller, and C code calls without any.
    module = sys.modules.setdefault(name, ModuleType(name)) if is_module else ModuleType(name)
    vars(module).setdefault("__builtins__", builtins)
    return vars(module)


def _fill_function(fn: FunctionType, state: tuple[Any, Any, dict[str, Any], list[tuple[Any, ...]]]) -> None:
    own, slots, used, contents = state
    for name in slots["_cloudpickle_submodules"]:
        importlib.import_module(name)
    # Keep existing values: loading never changes a variable of this process's own __main__.
    for name, value in used.items():
        fn.__globals__.setdefault(name, value)
    for cell, content in zip(fn.__closure__ or (), contents, strict=True):
        if content:
            cell.cell_contents = content[0]
    cloudpickle._function_setstate(fn, (own, slots))
    _show_in_main(fn)


def _of_enum_body(name: str, value: object, members: dict[str, Any]) -> bool:
    """Tell what the author of an enum wrote from what its metaclass added."""
    if name in members or (name.startswith("_") and not name.startswith("__") and name.endswith("_")):
        return False
    return not name.startswith("__") or (isinstance(value, FunctionType) and not goes_by_name(value))


def _known_class(token: str) -> Any:
    return cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID[token]


def _class_shell(token: str, make: Callable[..., type], args: tuple[Any, ...]) -> Any:
    if token not in cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID:
        _received.add(token)
        _unfilled.add(token)
        return make(*args)
    return _known_class(token)


def _fill_class(cls: type, state: tuple[str, dict[str, Any], dict[str, dict[str, Any]]]) -> None:
    token, attributes, members = state
    if token not in _unfilled:
        return
    _unfilled.discard(token)
    for name, value in attributes.items():
        type.__setattr__(cls, name, value)
    for name, values in members.items():
        vars(getattr(cls, name)).update(values)
    _show_in_main(cls)


def _show_in_main(obj: Any) -> None:
    """Let plain pickle and `typing.get_type_hints` find what was defined in the sender's __main__."""
    if obj.__module__ == "__main__" and obj.__name__ == obj.__qualname__ and obj.__name__.isidentifier():
        vars(sys.modules["__main__"]).setdefault(obj.__name__, obj)


def _untyped(data: Any) -> Any:
    import torch

    made = torch.empty(memoryview(data).nbytes, dtype=torch.uint8)
    made.numpy()[:] = memoryview(data)
    return made.untyped_storage()
