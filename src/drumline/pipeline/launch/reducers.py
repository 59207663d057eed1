"""How to pickle what pickle does not: the things that classes and functions are made of, by type."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import marshal
import pickle
import sys
import types
import typing
from collections.abc import Callable
from types import CellType, CodeType, ModuleType
from typing import Any

from drumline.pipeline.launch.by_name import goes_by_name, is_importable


def _module(module: ModuleType) -> Any:
    if sys.modules.get(module.__name__) is not module or not (
        module.__name__ == "__main__" or is_importable(module.__name__)
    ):
        raise pickle.PicklingError(f"module {module.__name__} cannot be imported under its name")
    return importlib.import_module, (module.__name__,)


def _make_cell() -> CellType:
    return CellType()


def _make_proxy(values: dict[Any, Any]) -> types.MappingProxyType[Any, Any]:
    return types.MappingProxyType(values)


def _cached(fn: Any) -> Any:
    if goes_by_name(fn):
        return fn.__qualname__
    return _make_cached, (fn.__wrapped__, fn.cache_parameters())


def _make_cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _make_cached_property(fn: Callable[..., Any], name: str) -> Any:
    made: functools.cached_property[Any] = functools.cached_property(fn)
    made.__set_name__(object, name)
    return made


def _type_variable(variable: typing.TypeVar) -> Any:
    name = variable.__name__
    if getattr(sys.modules.get(variable.__module__), name, None) is variable and is_importable(variable.__module__):
        return name
    variance: dict[str, Any] = {"covariant": variable.__covariant__, "contravariant": variable.__contravariant__}
    return functools.partial(typing.TypeVar, bound=variable.__bound__, **variance), (name, *variable.__constraints__)


def _dataclasses_own(sentinel: object) -> Any:
    """Dataclasses compare their sentinels by identity, so they go by name."""
    return next(name for name, one in vars(dataclasses).items() if one is sentinel)


_SENTINELS = ("MISSING", "KW_ONLY", "_FIELD", "_FIELD_CLASSVAR", "_FIELD_INITVAR", "_HAS_DEFAULT_FACTORY")

REDUCERS: dict[type, Callable[[Any], Any]] = {
    ModuleType: _module,
    CodeType: lambda code: (marshal.loads, (marshal.dumps(code),)),
    CellType: lambda cell: (_make_cell, ()),
    types.MappingProxyType: lambda proxy: (_make_proxy, (dict(proxy),)),
    staticmethod: lambda method: (staticmethod, (method.__func__,)),
    classmethod: lambda method: (classmethod, (method.__func__,)),
    property: lambda one: (property, (one.fget, one.fset, one.fdel, one.__doc__)),
    functools.cached_property: lambda one: (_make_cached_property, (one.func, one.attrname)),
    type(functools.lru_cache(len)): _cached,
    typing.TypeVar: _type_variable,
    **{type(getattr(dataclasses, name)): _dataclasses_own for name in _SENTINELS if hasattr(dataclasses, name)},
}
