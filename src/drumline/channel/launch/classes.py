"""A class as what it consists of, and made again from it in another process.

cloudpickle takes classes apart as well, but with three flaws. A class that comes back from a rank overwrites the
attributes of the sender's own; an enum loses its aliases and what its members' `__init__` set; and a class of
`__main__` is not found there by name. Here each class has a token, so that a class that comes back is the sender's own.
"""

from __future__ import annotations

import enum
import types
import uuid
import weakref
from typing import Any

from drumline.channel.launch.by_name import goes_by_name
from drumline.channel.launch.functions import show_in_main

# What a class must have when it is made; all else may refer to the class, so it follows.
_BODY = ("__module__", "__slots__", "__orig_bases__", "__dict__")
_MADE_ANEW = {"_abc_impl", "__annotate_func__"}

_tokens: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_classes: weakref.WeakValueDictionary[str, type] = weakref.WeakValueDictionary()
# Tokens of classes from other processes; those of the second set lack their attributes.
_received: set[str] = set()
_unfilled: set[str] = set()


def reduced(cls: type, *, reply: bool) -> Any:
    """Return a class as `reducer_override` does: what makes it, and what fills it."""
    token = _tokens.get(cls) or _track(cls, uuid.uuid4().hex)
    if reply and token in _received:
        return _known, (token,)
    attributes = {name: value for name, value in vars(cls).items() if not _is_made_anew(cls, name, value)}
    body = {name: attributes.pop(name) for name in _BODY if name in attributes}
    members: dict[str, Any] = {}
    if issubclass(cls, enum.Enum):
        members = {name: dict(vars(member)) for name, member in cls.__members__.items()}
        attributes = {name: value for name, value in attributes.items() if _of_enum_body(name, value, members)}
        body |= {name: member["_value_"] for name, member in members.items()}
    body["__qualname__"] = cls.__qualname__
    shell = token, type(cls), cls.__name__, cls.__bases__, body
    return _make, shell, (token, attributes, members), None, None, _fill_class


def _track(cls: type, token: str) -> str:
    _tokens[cls], _classes[token] = token, cls
    return token


def _known(token: str) -> type:
    return _classes[token]


def _is_made_anew(cls: type, name: str, value: object) -> bool:
    """Tell what making a class gives it: access to its slots and to the dict of an instance, caches."""
    if isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
        return value.__objclass__ is cls
    return name in _MADE_ANEW


def _of_enum_body(name: str, value: object, members: dict[str, Any]) -> bool:
    """Tell what the author of an enum wrote from what its metaclass added."""
    if name in members or (name.startswith("_") and not name.startswith("__") and name.endswith("_")):
        return False
    return not name.startswith("__") or (isinstance(value, types.FunctionType) and not goes_by_name(value))


def _make(token: str, metaclass: type, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
    if (known := _classes.get(token)) is not None:
        return known

    def fill(space: Any) -> None:  # one by one: an enum's own dict sees no update
        for key, value in body.items():
            space[key] = value

    cls = types.new_class(name, bases, {"metaclass": metaclass}, fill)
    _track(cls, token)
    _received.add(token)
    _unfilled.add(token)
    return cls


def _fill_class(cls: type, state: tuple[str, dict[str, Any], dict[str, dict[str, Any]]]) -> None:
    token, attributes, members = state
    if token not in _unfilled:
        return
    _unfilled.discard(token)
    for name, value in attributes.items():
        type.__setattr__(cls, name, value)
    for name, values in members.items():
        vars(getattr(cls, name)).update(values)
    show_in_main(cls)
