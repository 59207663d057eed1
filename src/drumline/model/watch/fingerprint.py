"""The current state of a value, cheap to take and compare, so that every step can check whether it has changed.

Numbers and text are compared by type and value; containers and plain objects by their contents; tensors by identity and
by how often they were changed in place; methods by their objects; variables of a context and weak references by what
they give; everything else by identity.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import warnings
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from enum import Enum, auto
from functools import lru_cache, partial
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    TracebackType,
)
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

PLAIN = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, range, type(...))
_PLAIN = frozenset(PLAIN)
_ORDERED = (list, tuple)
_KINDS = (list, tuple, deque, dict, OrderedDict, defaultdict, set, frozenset)
_CHANGING = (list, deque, set, dict, np.ndarray, array, bytearray, partial, ContextVar, ref)
_SETTLED = (*PLAIN, tuple, frozenset)
_DEPTH = 6
_SIZED = (list, tuple, deque, dict, set, frozenset)
_MOST = 1024  # entries: with more, only their identities are compared
_MANY = 65536  # entries: with more, only their number is compared
_WALK = 16384  # parts of a value: those beyond are compared by identity, which is said
# What computes nothing that a model returns: what it logs by, waits for, reads or runs beside.
_APART = (
    logging.Filterer, logging.LoggerAdapter, logging.Manager, logging.Formatter, io.IOBase, threading.Thread,
    threading.Barrier, threading.Event, threading.Condition, threading.Semaphore, type(threading.Lock()),
    type(threading.RLock()), BaseException, CodeType, FrameType, TracebackType,
)  # fmt: skip
WHOLE = (nn.Module, Tensor, type, FunctionType, BuiltinFunctionType, ModuleType, *_APART)
_FIELDLESS = (*WHOLE, MethodType)
_NUMBERS = (np.ndarray, array, bytearray)
_said: set[tuple[str, str]] = set()
# Libraries whose code reads no variable that a user changes between two steps, with what they are made of.
LIBRARIES = sys.stdlib_module_names | {
    "PIL", "_pytest", "accelerate", "bitsandbytes", "builtins", "diffusers", "einops", "filelock", "httpx",
    "httpx2", "huggingface_hub", "hypothesis", "matplotlib", "numpy", "packaging", "pandas", "peft", "psutil", "pytest",
    "requests", "rich", "safetensors", "scipy", "sklearn", "tensorboard", "tokenizers", "torch", "torchao", "tqdm",
    "transformers", "triton", "wandb", "yaml",
}  # fmt: skip


class Same(list[Any]):
    """Objects compared by identity; they are kept alive here, so that their ids are not reused.

    >>> Same([[1]]) == Same([[1]])
    False
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and [*map(id, self)] == [*map(id, other)]

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None


class _Sort(Enum):
    """How values of a class are compared."""

    PLAIN = auto()
    TENSOR = auto()
    WHOLE = auto()
    ROW = auto()
    TABLE = auto()
    OTHER = auto()


@lru_cache(maxsize=4096)
def _sort(kind: type) -> _Sort:
    """Return how values of a class are compared; asked for once, because some classes take long to ask."""
    if kind in _PLAIN:
        return _Sort.PLAIN
    if issubclass(kind, Tensor):
        return _Sort.TENSOR
    if issubclass(kind, WHOLE) and not issubclass(kind, _SIZED):
        return _Sort.WHOLE
    return _Sort.ROW if kind in _ORDERED else _Sort.TABLE if kind is dict else _Sort.OTHER


def plain_in(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a module's attributes that are plain values.

    >>> plain_in({"scale": 2.0, "names": ["a"]})
    {'scale': 2.0}
    """
    return {key: attribute for key, attribute in attributes.items() if type(attribute) in PLAIN}


def fingerprint(value: Any, depth: int = _DEPTH, *, name: str = "") -> Any:
    """Return the state of a value; equal as long as nothing about it changes.

    A value of very many parts is looked into only so far; a warning says so once, with the value's name.

    >>> settings = {"scale": 1}
    >>> before = fingerprint(settings)
    >>> settings["scale"] = 1.0
    >>> fingerprint(settings) == before, fingerprint({"scale": 1}) == before
    (False, True)
    """
    state: list[Any] = []  # plain values, and what else was found: first the value, then what is inside, and so on
    same = Same()  # what is compared by identity
    level = [value]
    while level:
        inside: list[Any] = []
        for part in level:
            kind: type = type(part)
            sort = _sort(kind)
            if sort is _Sort.PLAIN:
                state.append((kind, "nan" if kind is float and part != part else part))  # a NaN never equals itself
            elif sort is _Sort.TENSOR:
                state.append(0 if part.is_inference() else part._version)
                same.append(part)
            elif depth == 0 or sort is _Sort.WHOLE:
                state.append(None)
                same.append(part)
            elif sort is _Sort.ROW and len(part) <= _MOST:
                state.append((kind, len(part)))
                inside += part
            elif sort is _Sort.TABLE and len(part) <= _MOST:
                state.append((kind, [*part]))
                inside += part.values()
            else:
                content, more = _opened(part, kind, same)
                state.append((kind, content))
                inside += more
        if len(state) + len(inside) > _WALK:
            _say_bound(value, name)
            depth = 1
        level, depth = inside, depth - 1
    return (state, same) if same else state


def _say_bound(value: Any, name: str) -> None:
    """Warn once of a value that is too large to be looked at before every step."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if (name, kind) in _said:
        return
    _said.add((name, kind))
    warnings.warn(
        f"{name or 'a value'}, which the model's forward may read, is a {kind} of more than {_WALK:,} parts: before a "
        "step, those deeper inside are compared by identity. If you change one in place, create a new pipeline.",
        stacklevel=2,
    )


def is_settled(value: Any) -> bool:
    """Whether a value has one state as long as it is not replaced.

    >>> is_settled((1, "a")), is_settled(print), is_settled(([],)), is_settled(torch.ones(1))
    (True, True, False, False)
    """
    if isinstance(value, tuple | frozenset):
        return all(map(is_settled, value))
    return not isinstance(value, Tensor) and not can_change(value)


def _opened(value: Any, kind: type, same: Same) -> tuple[Any, Iterable[Any]]:
    """Return what to compare of a value, and the values inside; append to `same` what is compared by identity."""
    if _is_of(kind, _SIZED):
        return _contents(value, kind, same)
    if _is_of(kind, partial):
        same.append(value.func)
        return None, (value.args, value.keywords)
    if kind is MethodType:
        same.append(value.__func__)
        return None, (value.__self__,)
    same.append(value)
    if kind is ContextVar:
        return None, (value.get(None),)
    if _is_of(kind, ref):  # what it refers to is not kept alive here
        value = value()
        return id(value), (_fields(value) or {}).values()
    if _is_of(kind, _NUMBERS):
        return _numbers(value), ()
    fields = _fields(value)
    return (None, ()) if fields is None else ([*fields], fields.values())


@lru_cache(maxsize=16384)
def _is_of(kind: Any, classes: Any) -> bool:
    """Whether a class is one of others; objects are not asked, because some answer what they are by slow code."""
    return issubclass(kind, classes)


def _contents(value: Any, kind: type, same: Same) -> tuple[Any, Iterable[Any]]:
    """Return the same for a container; a long one, and one of a subclass, is compared by identity too."""
    if len(value) > _MOST:
        same.append(value)
        if len(value) <= _MANY:
            same += [item for pair in value.items() for item in pair] if isinstance(value, dict) else value
        return len(value), ()
    if kind not in _KINDS:
        same.append(value)
    if isinstance(value, dict):
        return [*value], value.values()
    return (set(value), ()) if isinstance(value, set | frozenset) else (len(value), value)


def _numbers(value: Any) -> Any:
    """Return what to compare of an array: all of its bytes, or some of a large one's."""
    if value.__class__ is np.ndarray and value.dtype.hasobject:
        return None
    if not isinstance(value, np.ndarray):
        return bytes(value[:_MANY]), len(value)
    few = value if value.nbytes <= _MANY else value.reshape(-1)[:: max(1, value.size // _MOST)]
    return value.shape, few.tobytes()


def _fields(value: Any) -> dict[str, Any] | None:
    """Return the fields of a user-defined object, including plain ones of its class."""
    kind: Any = type(value)
    if _is_of(kind, _FIELDLESS):
        return None
    space = getattr(value, "__dict__", None)
    fields: dict[str, Any] = dict(space or ())
    if kind.__module__.partition(".")[0] in LIBRARIES:
        return fields if space is not None and not callable(value) else None
    for cls in kind.__mro__[:-1]:
        for key, attribute in vars(cls).items():
            if isinstance(attribute, MemberDescriptorType):
                fields.setdefault(key, getattr(value, key, None))
            elif type(attribute) in PLAIN and not key.startswith("__"):
                fields.setdefault(key, attribute)
    return fields


def state_of(value: Any) -> Any:
    """Return the state of a value; that of an object, such as a config, by its fields."""
    fields = None if isinstance(value, (*_CHANGING, *_SETTLED)) else _fields(value)
    if fields is None:
        return fingerprint(value)
    return {key: fingerprint(field, _DEPTH - 1) for key, field in fields.items()}


def only_named(before: Any, now: Any) -> bool:
    """Whether an object only gained text where it had nothing, such as a config that detects its problem type once.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(kind=None)
    >>> before = state_of(config)
    >>> config.kind = "words"
    >>> only_named(before, state_of(config))
    True
    """
    if not isinstance(before, dict) or not isinstance(now, dict):
        return False
    nothing = fingerprint(None)
    differ = [(before.get(key, nothing), entry) for key, entry in now.items() if before.get(key) != entry]
    words = all(old == nothing and isinstance(new, list) and new[0][0] is str for old, new in differ)
    return words and len(now) >= len(before)


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
    if isinstance(value, MethodType):
        return can_change(value.__self__)
    fields = None if isinstance(value, _SETTLED) else _fields(value)
    return fields is not None and (bool(fields) or hasattr(value, "__dict__"))
