"""Which attributes of modules a traced forward reads and sets, and which of these uses cannot be repeated.

    self.count += 1              between blocks: read, then set. Every call of the forward would see another number
    block.scale = at             set between blocks, read inside one: a block that runs later would not know it
    self.mean = x.mean()         set inside a block, read inside another: no cut is possible between the two

Python code between blocks runs during tracing, not in every step. So what it reads there must stay the same, which
`Watch` checks at every step, and only code between blocks may read what it sets there, afterwards. Lists, dicts and
objects count as set if their contents have changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from drumline.core.errors import ModelError
from drumline.model.catalogue import whole_name
from drumline.model.follow.between_blocks import attribute
from drumline.model.follow.refusals import line_here
from drumline.model.hooks import HOOKS
from drumline.model.values import MISSING
from drumline.model.watch.fingerprint import PLAIN, can_change, fingerprint, only_named, state_of
from drumline.model.watch.watch import AttributeName

BETWEEN = -1

# The parts of modules, which other code checks.
_OWN = frozenset(
    {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "forward", "_is_full_backward_hook"}
    | {*HOOKS, "_output_capturing_hooks_installed"}  # Hugging Face: hooks that do nothing by default
)


@dataclass
class _Uses:
    """Who has read and who has set an attribute: calls by number, or the code between them."""

    readers: set[int] = field(default_factory=set)
    setters: set[int] = field(default_factory=set)
    first: Any = MISSING  # the value read between blocks before it was set there
    is_read_first: bool = False
    is_carried: bool = False  # from one call of the forward to the next
    line: str = ""  # the line that sets it
    is_table: bool = True  # whether a block has set it once, to what others make as well


class Attributes:
    """The attributes of some modules while these run; `who` returns what runs."""

    def __init__(
        self,
        names: Mapping[int, str],
        who: Callable[[], int],
        carried: Collection[str] = (),
        is_table: Callable[[Any], bool] = lambda value: False,
    ) -> None:
        self._names = names
        self._is_table = is_table  # whether a value holds nothing but tables
        self._carried = carried  # names of tensors that stages hold
        self._who = who
        self.is_paused = False  # while a block runs once more, by itself
        self.alone: set[int] = set()  # blocks that do the same by themselves, by the number of their call
        self.uses: dict[AttributeName, _Uses] = {}
        # Values that can change, as they were, and where they are kept.
        self._looked: dict[int, tuple[Any, Any, set[AttributeName]]] = {}

    def read(self, module: nn.Module, key: str, value: Any) -> None:
        """Record that an attribute was read; MISSING if it did not exist."""
        if self.is_paused or key in _OWN or key.startswith("__"):
            return
        name = self._names.get(id(module))
        if name is None or (self._carried and whole_name(name, key) in self._carried):
            return
        uses = self.uses.setdefault((name, key), _Uses())
        who = self._who()
        uses.readers.add(who)
        if who == BETWEEN and not uses.is_read_first and BETWEEN not in uses.setters:
            uses.is_read_first, uses.first = True, value
        if can_change(value):
            if id(value) not in self._looked:
                self._looked[id(value)] = (value, _state(value), set())
            self._looked[id(value)][2].add((name, key))

    def set(self, module: nn.Module, key: str, before: Any, value: Any) -> None:
        """Record that an attribute is set, or deleted if the value is MISSING."""
        name = self._names.get(id(module))
        with torch._C.DisableTorchFunction():
            is_same = fingerprint(before) == fingerprint(value)
        if self.is_paused or key in _OWN or name is None or is_same:
            return
        self._is_set((name, key), self._who(), value, is_first=before is None or before is MISSING)

    def _is_set(self, place: AttributeName, who: int, value: Any, *, is_first: bool = True) -> None:
        uses = self.uses.setdefault(place, _Uses())
        uses.setters.add(who)
        uses.is_table = uses.is_table and is_first and self._is_table(value)
        uses.line = uses.line or line_here()
        if who == BETWEEN and uses.is_read_first:
            uses.is_carried |= not _is_made_once(uses.first, value)

    def look(self) -> None:
        """Find lists, dicts and objects with changed contents: what runs now has changed them."""
        who = self._who()
        for number, (value, before, places) in self._looked.items():
            now = _state(value)
            if now != before:
                self._looked[number] = (value, now, places)
                if only_named(before, now):
                    continue
                for place in places:
                    self._is_set(place, who, value)

    def borrows(self, who: int) -> bool:
        """Whether a block has read an attribute that another block has set."""
        return any(who in uses.readers and uses.setters - {who, BETWEEN} for uses in self.uses.values())

    def judge(self, block: Callable[[int], str], bar: Callable[[int, str, int], None]) -> None:
        """Refuse what cannot be repeated; tell `bar` between which calls no cut is possible."""
        for place, uses in self.uses.items():
            if not uses.setters:
                continue
            named = attribute(*place)
            inside = sorted((uses.readers | uses.setters) - {BETWEEN})
            if BETWEEN in uses.setters:
                self._refuse_between(named, uses, [block(reader) for reader in sorted(uses.readers - {BETWEEN})])
            elif BETWEEN in uses.readers:
                raise ModelError(
                    f"the model's forward reads {named} between its blocks, which {block(min(uses.setters))!r} sets",
                    expected="blocks that return what the forward uses between them",
                    fix=f"return it from {block(min(uses.setters))!r}",
                )
            elif len(inside) > 1 and not self._is_made_by_each(uses, inside):
                first, last = inside[0], inside[-1]
                bar(first, f"{block(first)!r} and {block(last)!r} both use {named}, and one of them sets it", last)

    def _is_made_by_each(self, uses: _Uses, inside: Sequence[int]) -> bool:
        """Whether the first block that uses an attribute sets it to what the others, by themselves, make as well."""
        return uses.is_table and uses.setters == {inside[0]} and self.alone.issuperset(inside[1:])

    def _refuse_between(self, named: str, uses: _Uses, readers: Iterable[str]) -> None:
        if uses.is_carried:
            raise ModelError(
                f"the model's forward changes {named} between its blocks{uses.line}",
                expected="attributes with the same values at the start of every step",
                fix="change it inside a block, or outside the forward",
            )
        for reader in readers:
            raise ModelError(
                f"the model's forward sets {named} between its blocks{uses.line}, and {reader!r} reads it",
                expected="blocks that get what they use as arguments, or read attributes set before the step",
                fix="pass it to the block, or set it outside the forward",
            )

    def read_between(self) -> list[AttributeName]:
        """Return the attributes that the forward read between blocks without setting them before."""
        return [place for place, uses in self.uses.items() if uses.is_read_first]


def _state(value: Any) -> Any:
    """Return the state of a value; looking at its tensors is no use of them by the model."""
    with torch._C.DisableTorchFunction():
        return state_of(value)


def _is_made_once(before: Any, value: Any) -> bool:
    """Whether a value that depends on no input is stored where there was nothing: built again, it is the same."""
    if before is not None and before is not MISSING:
        return False
    if isinstance(value, tuple | list):
        return all(_is_made_once(before, item) for item in value)
    return not isinstance(value, FakeTensor) and (isinstance(value, Tensor) or not isinstance(value, PLAIN))
