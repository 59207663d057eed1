"""Find the part of a value that cannot be pickled: pickle names only its type, but users need to know who holds it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from types import FunctionType, MethodType
from typing import Any

from drumline.channel.launch import by_value
from drumline.channel.launch.by_name import content_of, global_values, goes_by_name


def blame(value: Any, name: str) -> str:
    """Return the path from a value to its innermost part that cannot be pickled, or "" if all of it can.

    >>> import threading
    >>> settings = {"lr": 0.1, "guard": threading.Lock()}
    >>> blame(lambda: settings, "fn")
    "fn uses the global `settings`, which holds ['guard'], a lock: cannot pickle '_thread.lock' object"
    """
    way, seen_ids = list[str](), {id(value)}
    error = _error_of(value)
    if error is None:
        return ""
    while True:
        for word, part in _parts(value):
            if id(part) not in seen_ids and (inner := _error_of(part)) is not None:
                way.append(word)
                seen_ids.add(id(part))
                value, error = part, inner
                break
        else:
            break
    steps = ", which ".join(text if text.startswith("uses ") else f"holds {text}" for text in way)
    return f"{name} {steps}, {_kind(value)}: {error}" if steps else f"{name}, {_kind(value)}: {error}"


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def _error_of(value: Any) -> Exception | None:
    try:
        by_value.dumps(value)
    except Exception as error:
        return error
    return None


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a value, each with how the value holds it."""
    match value:
        case FunctionType() if not goes_by_name(value):
            for name, part in global_values(value).items():
                yield f"uses the global `{name}`", part
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                yield from ((f"uses the variable `{name}`", part) for part in content_of(cell))
            yield "uses its defaults", value.__defaults__
            yield "uses its keyword defaults", value.__kwdefaults__
        case type():
            if not goes_by_name(value):
                yield from ((f"`{name}`", part) for name, part in vars(value).items())
        case functools.partial():
            yield "its function", value.func
            yield "its arguments", (*value.args, value.keywords)
        case MethodType():
            yield "its object", value.__self__
        case staticmethod() | classmethod():
            yield "its function", value.__func__
        case Mapping():
            yield from ((f"[{key!r}]", part) for key, part in value.items())
        case list() | tuple():
            yield from ((f"[{index}]", part) for index, part in enumerate(value))
        case set() | frozenset():
            yield from (("an element", part) for part in value)
        case _:
            yield "its class", type(value)
            slots = (name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()))
            names = dict.fromkeys([*getattr(value, "__dict__", {}), *slots])
            yield from ((f"`.{name}`", getattr(value, name, None)) for name in names)
