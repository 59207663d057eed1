"""Pickle functions and classes that the other process cannot import.

A function from a notebook cell, from `__main__` or inside another function is sent as its code, with the globals it
uses, its captured variables and its defaults. A class is sent with its attributes. All else is pickled by name.

>>> def counter(start):
...     return lambda: start + 1
>>> loads(dumps(counter(41)))()
42

cloudpickle's pickler does this for most of what such code holds: properties, type variables, views of dicts. Functions
and classes are taken apart in `functions` and `classes`, because cloudpickle loses part of them; without cloudpickle,
they must be importable.
"""

from __future__ import annotations

import copyreg
import dataclasses
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

from drumline.channel.launch import classes, functions
from drumline.channel.launch.by_name import goes_by_name, is_importable
from drumline.core.errors import LaunchError

try:
    import cloudpickle
except ImportError:
    cloudpickle = None

_Base: Any = cloudpickle.Pickler if cloudpickle else pickle.Pickler
_HEAP_TYPE = 1 << 9
_SMALL_BYTES = 4096  # smaller buffers stay in the stream


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
    value: name for name, value in vars(dataclasses).items() if type(value).__module__ == "dataclasses"
}
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    ModuleType: _module,
    CellType: lambda _: (CellType, ()),  # its functions fill it, because it may hold one of them
    functools.cached_property: lambda value: (functools.cached_property, (value.func,), {"attrname": value.attrname}),
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
        self._namespaces: dict[int, functions.Namespace] = {}
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
        if isinstance(obj, type):
            return classes.reduced(obj, reply=self._reply)
        self._keep_source(obj.__code__)
        space = self._namespaces.setdefault(id(obj.__globals__), functions.Namespace(obj.__globals__))
        return functions.reduced(obj, space)

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


def _untyped(data: Any) -> Any:
    import torch

    tensor = torch.empty(memoryview(data).nbytes, dtype=torch.uint8)
    tensor.numpy()[:] = memoryview(data)
    return tensor.untyped_storage()
