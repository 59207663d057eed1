"""Which functions and classes another process can import, and which globals a function uses."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import Any

_GLOBAL_OPS = {"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


def goes_by_name(obj: Any) -> bool:
    """Return whether another process can import a function or class by its name.

    >>> goes_by_name(functools.wraps), goes_by_name(lambda: 0)
    (True, False)
    """
    holder: Any = sys.modules.get(obj.__module__ or "")
    for part in obj.__qualname__.split("."):
        holder = getattr(holder, part, None)
    return holder is obj and is_importable(obj.__module__)


def is_importable(name: str) -> bool:
    """Return whether another process with the same `sys.path` would find this module, without importing it.

    >>> is_importable("os"), is_importable("__main__"), is_importable("no.such")
    (True, False, False)
    """
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return False
    parent = name.rpartition(".")[0]
    if parent and not is_importable(parent):
        return False
    spec = getattr(module, "__spec__", None)
    if spec is None:  # created by hand, or by the C code of its package
        return bool(parent)
    path = getattr(sys.modules[parent], "__path__", None) if parent else None
    return _finds(name, spec.origin, None if path is None else tuple(path), tuple(sys.path))


@functools.lru_cache(maxsize=1024)
def _finds(name: str, origin: str | None, path: tuple[str, ...] | None, _sys_path: tuple[str, ...]) -> bool:
    specs = (finder.find_spec(name, path, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return any(spec is not None and spec.origin == origin for spec in specs)


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and those of all functions and classes inside it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from codes(const)


def global_values(fn: FunctionType) -> dict[str, Any]:
    """Return the globals that a function and its inner functions use, if they exist.

    >>> sorted(global_values(global_values))
    ['_GLOBAL_OPS', 'codes', 'dis']
    """
    steps = (step for code in codes(fn.__code__) for step in dis.get_instructions(code))
    names = dict.fromkeys(step.argval for step in steps if step.opname in _GLOBAL_OPS)
    return {name: fn.__globals__[name] for name in names if name in fn.__globals__}


def content_of(cell: CellType) -> tuple[Any, ...]:
    """Return what a captured variable holds, or nothing if it is not assigned yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
