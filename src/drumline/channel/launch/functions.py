"""A function as what it consists of, and made again from it in another process.

cloudpickle takes functions apart as well, but fails for three things that users write in notebooks. Two closures that
share a variable each get their own; a class inside a function does not bring the globals it uses; and a function of
`__main__` does not see the variables of the other process's `__main__`.
"""

from __future__ import annotations

import builtins
import importlib
import sys
from collections.abc import Iterable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from drumline.channel.launch.by_name import codes, content_of, global_values, is_importable

_ATTRIBUTES = (
    "__qualname__", "__module__", "__doc__", "__defaults__", "__kwdefaults__", "__annotations__", "__type_params__",
)  # fmt: skip


class Namespace:
    """The globals of some functions: those of a module, or a separate dict."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.name = values.get("__name__", "__main__")
        module = sys.modules.get(self.name)
        self.is_module = module is not None and vars(module) is values
        self.is_importable = self.is_module and is_importable(self.name)

    def __reduce__(self) -> Any:
        return _make_namespace, (self.name, self.is_module, self.is_importable)


class _Filling(NamedTuple):
    """What a function gets once it exists, because all of it may refer to the function."""

    attributes: dict[str, Any]
    variables: dict[str, Any]
    used: dict[str, Any]
    contents: list[tuple[Any, ...]]
    submodules: list[str]


def reduced(fn: FunctionType, space: Namespace) -> Any:
    """Return a function as `reducer_override` does: what makes it, and what fills it."""
    used, contents = global_values(fn), [content_of(cell) for cell in fn.__closure__ or ()]
    values = [*used.values(), *(value for content in contents for value in content)]
    filling = _Filling(
        {name: getattr(fn, name) for name in _ATTRIBUTES if hasattr(fn, name)},
        vars(fn),
        {} if space.is_importable else used,
        contents,
        _submodules(fn, values),
    )
    shell = fn.__code__, space, fn.__name__, None, fn.__closure__
    return FunctionType, shell, filling, None, None, _fill_function


def show_in_main(obj: Any) -> None:
    """Let plain pickle and `typing.get_type_hints` find what was defined in the sender's __main__."""
    if obj.__module__ == "__main__" and obj.__name__ == obj.__qualname__ and obj.__name__.isidentifier():
        vars(sys.modules["__main__"]).setdefault(obj.__name__, obj)


def _submodules(fn: FunctionType, values: Iterable[Any]) -> list[str]:
    """Return the modules that a function reaches through a package: `ElementTree` in `xml.etree.ElementTree`."""
    names = {name for code in codes(fn.__code__) for name in code.co_names}
    packages = tuple(f"{value.__name__}." for value in values if isinstance(value, ModuleType) and value.__package__)
    inside = [(name, package) for name in list(sys.modules) for package in packages if name.startswith(package)]
    reached = [name for name, package in inside if names.issuperset(name.removeprefix(package).split("."))]
    return [name for name in dict.fromkeys(reached) if is_importable(name)]


def _make_namespace(name: str, is_module: bool, is_importable: bool) -> dict[str, Any]:
    if is_importable:
        return vars(importlib.import_module(name))
    # Globals without builtins would use those of the caller, and C code calls without any.
    module = sys.modules.setdefault(name, ModuleType(name)) if is_module else ModuleType(name)
    vars(module).setdefault("__builtins__", builtins)
    return vars(module)


def _fill_function(fn: FunctionType, filling: _Filling) -> None:
    for name in filling.submodules:
        importlib.import_module(name)
    # Keep existing values: loading never changes a variable of this process's own __main__.
    for name, value in filling.used.items():
        fn.__globals__.setdefault(name, value)
    for cell, content in zip(fn.__closure__ or (), filling.contents, strict=True):
        if content:
            cell.cell_contents = content[0]
    for name, value in filling.attributes.items():
        setattr(fn, name, value)
    vars(fn).update(filling.variables)
    show_in_main(fn)
