"""What code says that it reads and changes, from its instructions alone: nothing runs."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import NamedTuple

_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"}
_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF"}
_ADDING = {"append", "appendleft", "add", "extend", "insert", "update", "put", "setdefault"}
_WITHOUT_EFFECT = {
    "BINARY_SUBSCR",
    "COPY",
    "SWAP",
    "BINARY_OP",
    "LOAD_CONST",
    "LOAD_FAST",
    "LOAD_SMALL_INT",
    "CACHE",
    "NOP",
}


class Facts(NamedTuple):
    """What a function's code mentions, with the code inside it."""

    names: frozenset[str]
    stored: frozenset[str]  # attributes, globals, variables of closures that it sets


@lru_cache(maxsize=4096)
def facts_of(code: CodeType) -> Facts:
    """Return what code mentions.

    >>> def forward(self):
    ...     self.calls += 1
    >>> sorted(facts_of(forward.__code__).stored)
    ['calls']
    """
    names, stored = set[str](), set[str]()
    for part in _parts(code):
        names.update(part.co_names, part.co_freevars)
        stored.update(each.argval for each in dis.get_instructions(part) if each.opname in _STORES)
    return Facts(frozenset(names), frozenset(stored))


@lru_cache(maxsize=4096)
def is_only_written(code: CodeType, name: str) -> bool:
    """Whether code never reads what has a name, but to change it: nothing else can depend on it.

    >>> def counts(self):
    ...     self.calls += 1
    ...     self.seen.append(1)
    >>> def reads(self):
    ...     return self.calls
    >>> is_only_written(counts.__code__, "calls"), is_only_written(counts.__code__, "seen")
    (True, True)
    >>> is_only_written(reads.__code__, "calls")
    False
    """
    for part in _parts(code):
        if name in part.co_consts:  # for getattr, or a key of __dict__
            return False
        steps = [each for each in dis.get_instructions(part) if each.opname != "CACHE"]
        for at, step in enumerate(steps):
            if step.opname in _LOADS and step.argval == name and not _is_written(steps[at + 1 : at + 12], name):
                return False
    return True


def _is_written(following: list[dis.Instruction], name: str) -> bool:
    """Whether what was loaded is only added to, changed, or set under a key."""
    if not following:
        return False
    first = following[0]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval in _ADDING
    num_copies = 0
    for step in following:
        if step.opname in _STORES:
            return bool(step.argval == name)
        if step.opname == "STORE_SUBSCR":
            return True
        if step.opname == "BINARY_SUBSCR" and num_copies < 2:  # else it goes back to where it was
            return False
        num_copies += step.opname == "COPY"
        if step.opname not in _WITHOUT_EFFECT:
            return False
    return False


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
