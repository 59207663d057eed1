"""Whether blocks of several stages use only entries of their own in a dict that they share, as their code says.

::

    STATE[self.name] = 0.5 * STATE.get(self.name, 0) + y.mean()        its own, if no other block has the name
    sum(STATE.values())                                                everybody's
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import CodeType
from typing import Any

from torch import nn

from drumline.model.kept_state.code import entry_keys, facts_of
from drumline.model.values import MISSING
from drumline.model.watch.fingerprint import PLAIN

Keys = frozenset[Any] | None  # None: any


def keys_of(module: nn.Module, code: Collection[CodeType], names: Iterable[str]) -> Keys:
    """Return the entries that a block uses of a dict that its code calls by these names.

    >>> class Counts(nn.Module):
    ...     def forward(self, x):
    ...         STATE[self.name] = STATE.get(self.name, 0) + 1
    >>> block = Counts(); block.name = "first"
    >>> keys_of(block, [Counts.forward.__code__], ["STATE"])
    frozenset({'first'})
    """
    forwards = [part for part in code if part.co_name != "__init__"]
    stored = {name for part in forwards for name in facts_of(part).stored}
    keys = set[Any]()
    for part in forwards:
        for used in [entry_keys(part, name) for name in names]:
            if used is None or any(key.is_attribute and key.value in stored for key in used):
                return None
            for key in used:
                values = _values_of(module, part, key.value) if key.is_attribute else {key.value}
                if not values:
                    return None
                keys |= values
    return frozenset(keys)


def _values_of(module: nn.Module, code: CodeType, name: str) -> set[Any]:
    """Return what those modules of a block have in an attribute whose method this is; nothing if it is no plain value.

    Other objects have methods, too, and attributes of the same names.
    """
    values = [
        _attribute(part, name)
        for part in module.modules()
        if any(getattr(each, "__code__", None) is code for cls in type(part).__mro__ for each in vars(cls).values())
    ]
    return set(values) if all(type(value) in PLAIN for value in values) else set()


def _attribute(module: nn.Module, name: str) -> Any:
    of_class = getattr(type(module), name, MISSING)
    return vars(module).get(name, of_class) if of_class is MISSING or type(of_class) in PLAIN else of_class


def are_apart(keys: Iterable[tuple[Any, Keys]]) -> bool:
    """Whether no two owners use the same entry; `keys` has pairs of an owner and the entries of a part of it.

    >>> are_apart([(0, frozenset("a")), (0, frozenset("a")), (1, frozenset("b"))]), are_apart([(0, None)])
    (True, False)
    """
    owners: dict[Any, Any] = {}
    return all(
        entries is not None and all(owners.setdefault(entry, owner) == owner for entry in entries)
        for owner, entries in keys
    )
