"""What a value is at the moment, cheap to take and to compare: whether it has changed since can be asked in every step.

Numbers and text are told apart by type and value, containers and plain objects by what is inside, tensors by identity
and by how often they were changed in place, all else by identity.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, type(...))
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict)
_DEPTH = 3
_SIZED = (*_SEQUENCES, *_MAPPINGS, set, frozenset)
_MOST = 1024  # entries: of more only the number is looked at


class _Same:
    """An object that is itself alone: it lives on here, so that no other one gets its id."""

    __slots__ = ("itself", "version")

    def __init__(self, itself: Any, version: int = 0) -> None:
        self.itself = itself
        self.version = version

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.itself is self.itself and other.version == self.version

    __hash__ = None  # type: ignore[assignment]


def fingerprint(value: Any, depth: int = _DEPTH) -> Any:
    """Return what a value is now; equal as long as nothing about it changes.

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
    if isinstance(value, _SIZED) and len(value) > _MOST:
        return (_Same(value), len(value))
    if kind in _SEQUENCES:
        return (kind, [fingerprint(one, depth - 1) for one in value])
    if kind in _MAPPINGS:
        return (kind, [(key, fingerprint(one, depth - 1)) for key, one in value.items()])
    if kind in (set, frozenset):
        return (kind, set(value))
    if is_object(value):
        return (_Same(value), [(key, fingerprint(one, depth - 1)) for key, one in vars(value).items()])
    return _Same(value)


def only_named(before: Any, now: Any) -> bool:
    """Whether an object only got words where it had nothing, as a config whose kind of problem is found out once.

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
    """Whether a value may become another one without being exchanged.

    >>> can_change([1]), can_change((1, 2)), can_change("a")
    (True, False, False)
    """
    kind = type(value)
    return kind in (list, deque, set) or kind in _MAPPINGS or is_object(value)


def is_object(value: Any) -> bool:
    """Whether a value is an object of somebody's own class, such as a config: its fields are plain attributes.

    >>> from types import SimpleNamespace
    >>> is_object(SimpleNamespace(scale=1)), is_object(nn.ReLU()), is_object(print)
    (True, False, False)
    """
    if isinstance(value, nn.Module | Tensor | type | FunctionType | MethodType | ModuleType):
        return False
    return hasattr(value, "__dict__") and not callable(value)
