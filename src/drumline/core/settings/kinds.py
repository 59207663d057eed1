"""Values in the kinds that type hints name, as far as a TOML file can hold them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from types import UnionType
from typing import Any, Union, get_args, get_origin

_WHOLE = range(-(2**63), 2**63)
_LARGEST = sys.float_info.max


class Wrong(Exception):
    """A value that cannot be taken; the text is what was expected."""


def in_kind(kind: Any, value: Any) -> Any:
    """Return a value in a kind, or raise Wrong.

    >>> in_kind(tuple[str, ...], ["a.txt"]), in_kind(float, 1)
    (('a.txt',), 1.0)
    """
    if get_origin(kind) is tuple:
        if not isinstance(value, list | tuple):
            raise Wrong
        return tuple(in_kind(get_args(kind)[0], item) for item in value)
    if get_origin(kind) is dict:
        if not isinstance(value, Mapping) or not is_plain(value):
            raise Wrong
        return _as_read(value)
    if get_origin(kind) in (Union, UnionType):
        for each in get_args(kind):
            with suppress(Wrong):
                return in_kind(each, value)
        raise Wrong
    if kind is float and _is_finite(value):
        return float(value)
    if kind is int and type(value) is int and value in _WHOLE:
        return value
    if (kind is bool and type(value) is bool) or (kind is str and type(value) is str and _is_text(value)):
        return value
    raise Wrong


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST


def _is_text(value: str) -> bool:
    """Whether a text can be written to a file: halves of characters cannot."""
    return not any("\ud800" <= name <= "\udfff" for name in value)


def _as_read(value: Any) -> Any:
    """Return a plain value as reading it from a file would."""
    if isinstance(value, Mapping):
        return {name: _as_read(item) for name, item in value.items()}
    return [_as_read(item) for item in value] if isinstance(value, list | tuple) else value


def is_plain(value: Any) -> bool:
    """Whether a value can be written to a config and read again.

    >>> is_plain({"betas": [0.9, 0.95]}), is_plain({"when": object()})
    (True, False)
    """
    if isinstance(value, Mapping):
        return all(isinstance(name, str) and is_plain(name) and is_plain(item) for name, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_plain(item) for item in value)
    if isinstance(value, float):
        return _is_finite(value)
    if isinstance(value, str):
        return _is_text(value)
    return isinstance(value, bool) or (isinstance(value, int) and value in _WHOLE)
