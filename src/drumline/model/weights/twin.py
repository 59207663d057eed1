"""A copy of one of the user's modules, which follows what the user changes in the original."""

from __future__ import annotations

import copy
from types import MethodType
from typing import Any
from weakref import ref

from torch import nn

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.catalogue import whole_name
from drumline.model.hooks import HOOKS
from drumline.model.watch.fingerprint import PLAIN, fingerprint, plain_in

Table = dict[str, Any]
_CONTAINERS = (list, dict, set)
_BY_CONTENT = frozenset({*PLAIN, *_CONTAINERS})
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *HOOKS})


class Twin:
    """A module of the user's, as long as it lives, and its copy here; both share their hooks.

    >>> original, copied = nn.Dropout(0.1), nn.Dropout(0.1)
    >>> twin = Twin(original, copied)
    >>> original.p = 0.5; twin.follow("3", since="the block moved here"); copied.p
    0.5
    """

    def __init__(self, theirs: nn.Module, ours: nn.Module) -> None:
        self.theirs, self.ours = ref(theirs), ours
        space = vars(theirs)
        vars(ours).update({kind: space[kind] for kind in HOOKS if kind in space})
        self.begin()

    def begin(self) -> None:
        """Follow the user's module from its current state."""
        if (original := self.theirs()) is not None:
            self._plain, self._containers = plain_in(vars(original)), _containers_in(vars(original))
            self._others = _others_in(vars(original))
            self._trains = _trains(original)

    def settle(self) -> None:
        """Take attributes and their contents as they are: a step has changed them, and this made no difference."""
        if (original := self.theirs()) is not None:
            self._containers, self._others = _containers_in(vars(original)), _others_in(vars(original))

    def follow(self, block: str, *, since: str) -> None:
        """Take over the attributes, the mode among them, that the user has replaced, and what is frozen.

        `block` and `since` say in an error where the module is, and since when it must not change otherwise.
        """
        if (original := self.theirs()) is None:
            return
        if _containers_in(vars(original)) != self._containers:
            raise ModelError(
                f"a list, dict or set in an attribute of block {block!r} has changed since {since}",
                expected="unchanged contents, because this process runs a copy of the block",
                fix="create a new pipeline",
            )
        before, now = self._plain, plain_in(vars(original))
        if fingerprint(now) != fingerprint(before):
            self._plain, attributes = now, vars(self.ours)
            attributes.update(
                (key, entry) for key, entry in now.items() if key not in before or before[key] is not entry
            )
            for key in before.keys() - vars(original).keys():
                attributes.pop(key, None)
        self._follow_others(_others_in(vars(original)), block, since=since)
        if (trains := _trains(original)) != self._trains and trains.keys() == self.ours._parameters.keys():
            self._trains = trains
            for name, param in self.ours._parameters.items():
                if param is not None:
                    param.requires_grad_(trains[name])

    def _follow_others(self, now: Table, block: str, *, since: str) -> None:
        """Take over functions, tensors and objects that are new; refuse methods of the user's other modules."""
        before, self._others = self._others, now
        for key, value in now.items():
            if key in before and before[key] is value:
                continue
            if isinstance(value, MethodType) and value.__self__ is self.theirs():
                value = MethodType(value.__func__, self.ours)
            elif isinstance(value, MethodType) and isinstance(value.__self__, nn.Module):
                raise ModelError(
                    f"the attribute {key!r} of block {block!r} was set to a method of another module since {since}",
                    expected="a function, because this process runs a copy of the block",
                    fix="create a new pipeline",
                )
            vars(self.ours)[key] = value
        for key in before.keys() - now.keys():
            if key not in self._plain and vars(self.ours).get(key) is before[key]:
                del vars(self.ours)[key]


def cannot_copy(block: Block, error: Exception) -> ModelError:
    """Return what to raise for a block that cannot be copied, with the name of the attribute."""
    what = f"block {block.name!r} cannot be copied"
    for name, module in block.module.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN and not _can_be_copied(value):
                what = f"the attribute {whole_name(name, key)!r} of block {block.name!r} cannot be copied"
    return ModelError(
        f"{what}, and this process runs a copy of the block, too: {error}",
        expected="attributes that copy.deepcopy copies",
        fix="give the block what it needs as an input, or choose a schedule with one copy of each stage, such as zb-v",
    )


def _can_be_copied(value: Any) -> bool:
    try:
        copy.deepcopy(value)
    except (TypeError, NotImplementedError):
        return False
    return True


def _trains(module: nn.Module) -> dict[str, bool]:
    """Return which parameters of a module are not frozen."""
    return {name: param is not None and param.requires_grad for name, param in module._parameters.items()}


def _others_in(attributes: Table) -> Table:
    """Return the attributes that are neither plain nor lists, dicts or sets: functions, tensors, objects."""
    return {key: attr for key, attr in attributes.items() if type(attr) not in _BY_CONTENT and key not in _OWN}


def _containers_in(attributes: Table) -> list[Any]:
    """Return the states of lists, dicts and sets among a module's attributes."""
    return [fingerprint(attr) for key, attr in attributes.items() if type(attr) in _CONTAINERS and key not in _OWN]
