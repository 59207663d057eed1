"""The current state of a value, cheap to take and compare, so that every step can check whether it has changed.

Numbers and text are compared by type and value, containers and plain objects by their contents, tensors by identity and
by how often they were changed in place, everything else by identity.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, type(...))
_KINDS = (list, tuple, deque, dict, OrderedDict, defaultdict, set, frozenset)
_CHANGING = (list, deque, set, dict, np.ndarray, array, bytearray, partial)
_SETTLED = (*PLAIN, tuple, frozenset)
_DEPTH = 6
_SIZED = (list, tuple, deque, dict, set, frozenset)
_MOST = 1024  # entries: with more, only their identities are compared
_MANY = 65536  # entries: with more, only their number is compared
_WHOLE = (nn.Module, Tensor, type, FunctionType, MethodType, BuiltinFunctionType, ModuleType)
LIBRARIES = frozenset({"torch", "numpy", "transformers", "builtins"}) | sys.stdlib_module_names


class _Same:
    """An object compared by identity; it is kept alive here, so that its id is not reused."""

    __slots__ = ("itself", "version")

    def __init__(self, itself: Any, version: int = 0) -> None:
        self.itself = itself
        self.version = version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.itself is self.itself and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


class _Entries:
    """The entries of a long container by identity; they are kept alive here, so that their ids are not reused."""

    __slots__ = ("kept",)

    def __init__(self, value: Any) -> None:
        self.kept = [one for pair in value.items() for one in pair] if isinstance(value, dict) else list(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Entries) and list(map(id, self.kept)) == list(map(id, other.kept))

    __hash__ = None  # type: ignore[assignment]


def plain_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a module's attributes that are plain values.

    >>> plain_in({"scale": 2.0, "names": ["a"]})
    {'scale': 2.0}
    """
    return {key: one for key, one in attributes.items() if type(one) in PLAIN}


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Return the state of a value; equal as long as nothing about it changes.

    >>> settings = {"scale": 1}
    >>> before = fingerprint(settings)
    >>> settings["scale"] = 1.0
    >>> fingerprint(settings) == before, fingerprint({"scale": 1}) == before
    (False, True)
    """
    kind = type(value)
    if kind is float and value != value:  # a NaN is never equal to itself
        return (float, "nan")
    if kind in PLAIN:
        return (kind, value)
    if isinstance(value, Tensor):
        return _Same(value, 0 if value.is_inference() else value._version)
    if depth == 0:
        return _Same(value)
    if isinstance(value, _SIZED):
        return _contents(value, kind, depth)
    if isinstance(value, np.ndarray | array | bytearray):
        return _numbers(value)
    if isinstance(value, partial):
        return (_Same(value.func), fingerprint(value.args, depth - 1), fingerprint(value.keywords, depth - 1))
    fields = _fields(value)
    if fields is not None:
        return (_Same(value), [(key, fingerprint(one, depth - 1)) for key, one in fields.items()])
    return _Same(value)


def _contents(value: Any, kind: type, depth: int) -> Any:
    """Return the state of a container, or of a subclass of one."""
    own = () if kind in _KINDS else (_Same(value),)
    if len(value) > _MOST:
        return (_Same(value), _Entries(value) if len(value) <= _MANY else len(value))
    if isinstance(value, dict):
        return (kind, *own, [(key, fingerprint(one, depth - 1)) for key, one in value.items()])
    if isinstance(value, set | frozenset):
        return (kind, *own, set(value))
    return (kind, *own, [fingerprint(one, depth - 1) for one in value])


def _numbers(value: Any) -> Any:
    """Return the state of an array: all of its bytes, or some of a large one's."""
    if value.__class__ is np.ndarray and value.dtype.hasobject:
        return _Same(value)
    if not isinstance(value, np.ndarray):
        return (_Same(value), bytes(value[:_MANY]), len(value))
    few = value if value.nbytes <= _MANY else value.reshape(-1)[:: max(1, value.size // _MOST)]
    return (_Same(value), value.shape, few.tobytes())


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a user-defined object, including plain ones of its class."""
    if isinstance(value, _WHOLE):
        return None
    fields: dict[str, Any] = dict(getattr(value, "__dict__", ()))
    kind = type(value)
    if kind.__module__.partition(".")[0] in LIBRARIES:
        return fields if hasattr(value, "__dict__") and not callable(value) else None
    for cls in kind.__mro__[:-1]:
        for key, one in vars(cls).items():
            if isinstance(one, MemberDescriptorType):
                fields.setdefault(key, getattr(value, key, None))
            elif type(one) in PLAIN and not key.startswith("__"):
                fields.setdefault(key, one)
    return fields


def only_named(before: Any, now: Any) -> bool:
    """Whether an object only gained text where it had nothing, such as a config that detects its problem type once.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(kind=None)
    >>> before = fingerprint(config)
    >>> config.kind = "words"
    >>> only_named(before, fingerprint(config))
    True
    """
    if not all(isinstance(one, tuple) and isinstance(one[0], _Same) for one in (before, now)) or before[0] != now[0]:
        return False
    fields = dict(before[1])
    nothing = (type(None), None)
    differ = [(fields.get(key, nothing), one) for key, one in now[1] if fields.get(key) != one]
    words = all(old == nothing and isinstance(new, tuple) and new[0] is str for old, new in differ)
    return words and len(now[1]) >= len(fields)


def can_change(value: Any) -> bool:
    """Whether a value can change without being replaced.

    A user-defined object, such as a config, can: its fields are plain attributes.

    >>> can_change([1]), can_change((1, 2)), can_change("a")
    (True, False, False)
    >>> from types import SimpleNamespace
    >>> can_change(SimpleNamespace(scale=1)), can_change(nn.ReLU()), can_change(print)
    (True, False, False)
    """
    if isinstance(value, _CHANGING):
        return True
    fields = None if isinstance(value, _SETTLED) else _fields(value)
    return fields is not None and (bool(fields) or hasattr(value, "__dict__"))
