"""The state that blocks keep beside parameters and buffers: found, and put back for a run that is repeated.

::

    F, first in a mode   look at all attributes, before and after; remember those whose contents change
    F, later             take what these hold, and a table of all attributes: those that are set anew show themselves
    recomputation        runs on what was taken; then blocks keep again what they keep now
    nothing changed      nothing is held for the recomputation

Where blocks may keep something is in model/kept_state/spaces.py. What cannot be taken back, an iterator that a forward
uses up, is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from torch import Tensor

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.kept_state.contents import is_same_value, kind_of
from drumline.model.kept_state.keeping import StateBefore
from drumline.model.kept_state.snapshot import MOST_BYTES, Snapshot, version_of
from drumline.model.kept_state.spaces import Table, fill, is_same_table, own_values, spaces_of
from drumline.model.kept_state.spies import Spies, kind_of_iterator
from drumline.model.values import MISSING
from drumline.model.watch.used_up import can_be_used_up

_FEW = 64  # objects in a value that may begin to change at any time, and items of each
_FIX = 'give it what it needs as an input, or do not recompute it: checkpoint="none", or name the other blocks'


class Ledger:
    """The state that some blocks keep; entered for a forward, it knows in `before` afterwards what that has changed."""

    def __init__(self, blocks: Sequence[Block], *, refuses: bool) -> None:
        self._owners = spaces_of(blocks)
        self._spaces = [owner.table for owner in self._owners]
        self._modules = [owner.table for owner in self._owners if owner.is_module]
        self._refuses = refuses  # what cannot be taken back
        self.is_needed = self.is_new = bool(self._owners)  # new: no forward was looked at
        self.is_open = False
        self.changes = False  # whether any forward has changed anything
        self.before: StateBefore | None = None
        self._deep: dict[tuple[int, str], bool] = {}  # attributes whose contents change, and whether their tensors do
        self._iterates = False  # whether there are iterators, from which any forward may begin to take
        self._still: list[tuple[int, str]] = []  # attributes with tensors that do not
        self._num_looks: Counter[tuple[bool, ...]] = Counter()
        self._known: set[tuple[bool, ...]] = set()  # modes in which a look has found nothing new
        self._places: set[tuple[int, str]] = set()  # attributes that forwards have set
        self._altered: dict[
            tuple[int, str], None
        ] = {}  # attributes that they have set, or in which they changed something
        self._mode: tuple[bool, ...] = ()
        self._tables: list[Table] = []
        self._snapshot: Snapshot | None = None
        self._marks: list[tuple[int, str, Tensor, int]] = []
        self._spies: Spies | None = None

    def __enter__(self) -> None:
        """Take what the forward may change."""
        self.is_new, self.is_open, self.before = False, True, None
        self._mode = tuple([module.get("training", True) for module in self._modules])
        tables: list[Table] = [space.copy() for space in self._spaces]
        self._tables = tables
        if self._mode in self._known and not self._iterates:
            deep = self._deep
            most_bytes = inf if any(deep.values()) else -1
            kept_deep = (tables[at].get(name) for at, name in deep)
            self._snapshot = Snapshot(kept_deep, most_bytes=most_bytes) if deep else None
            tensors = ((at, name, tables[at].get(name)) for at, name in self._still)
            self._marks = [(at, name, t, version_of(t)) for at, name, t in tensors if isinstance(t, Tensor)]
            return
        values = (value for table in tables for value in own_values(table).values())
        self._snapshot, self._marks = Snapshot(values, most_bytes=MOST_BYTES), []
        self._iterates = self._refuses and bool(self._snapshot.iterators)
        if self._iterates:
            self._spies = Spies(self._snapshot, self._spaces)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Find what has changed, and keep what it was."""
        self.is_open = False
        tables, snapshot, spies = self._tables, self._snapshot, self._spies
        self._tables, self._snapshot, self._spies = [], None, None
        if spies is not None:
            spies.leave()
        if kind is not None:
            return
        for used in () if spies is None else spies.used():
            self._refuse_used(tables, used)
        reset = set() if all(map(is_same_table, tables, self._spaces)) else self._reset_in(tables)
        changed = set() if snapshot is None else snapshot.changed()
        self.changes |= bool(reset or changed)
        if reset:
            self._altered.update(dict.fromkeys(place for place in reset if place not in self._places))
        if snapshot is not None and (self._iterates or self._mode not in self._known):
            if changed:
                places = ((at, name) for at, table in enumerate(tables) for name in own_values(table))
                reached = (place for place in places if snapshot.reaches(tables[place[0]][place[1]], changed))
                self._altered.update(dict.fromkeys(reached))
            self._learn(tables, snapshot, changed, settled=not reset)
            snapshot = snapshot.within(tables[at].get(name) for at, name in self._deep)
        elif reset and any(_may_change(self._spaces[at].get(name)) for at, name in reset - self._places):
            self._known.clear()  # something new, into which nobody has looked
        self._places |= reset
        if self._marks or changed:
            self._refuse_uncopied(tables, snapshot)
        self.before = StateBefore(self._spaces, tables, snapshot)

    @property
    def num_kept(self) -> int:
        """How many attributes and variables forwards have changed."""
        return len(self._altered)

    def kept_values(self) -> list[tuple[str, str]]:
        """Return what forwards have changed, each with its block."""
        return [(self._owners[at].block, self._owners[at].label(name)) for at, name in self._altered]

    def _reset_in(self, tables: list[Table]) -> set[tuple[int, str]]:
        """Return the attributes that are others than they were."""
        return {
            (at, name)
            for at, (table, space) in enumerate(zip(tables, self._spaces, strict=True))
            if not is_same_table(table, space)
            for name in {**table, **space}
            if not is_same_value(table.get(name, MISSING), space.get(name, MISSING))
        }

    def rewind(self) -> None:
        """If a forward is under way, let blocks keep again what they kept when it began: it starts again."""
        if self.is_open:
            if self._snapshot is not None:
                self._snapshot.rewind()
            for space, table in zip(self._spaces, self._tables, strict=True):
                fill(space, table)
            if self._spies is not None:
                self._spies.enter()

    def _learn(self, tables: list[Table], snapshot: Snapshot, changed: set[int], *, settled: bool) -> None:
        """Remember the attributes whose contents have changed; look again until a forward shows nothing new."""
        tensors, num_deep = snapshot.changed_tensors(), len(self._deep)
        attributes = [(at, name) for at, table in enumerate(tables) for name in own_values(table)]
        for at, name in attributes:
            value = tables[at][name]
            if snapshot.is_small(value, _FEW) or snapshot.reaches(value, changed):
                in_place = snapshot.reaches(value, tensors)
                self._deep[at, name] = self._deep.get((at, name), False) or in_place
        self._num_looks[self._mode] += 1
        if len(self._deep) == num_deep and (settled or self._num_looks[self._mode] > 1):
            self._known.add(self._mode)
            self._still = [place for place in attributes if not self._deep.get(place, False)]
            self._still = [(at, name) for at, name in self._still if isinstance(tables[at][name], Tensor)]

    def _refuse_used(self, tables: list[Table], iterator: Any) -> None:
        place = self._holder(tables, lambda value: Snapshot([value], most_bytes=-1).holds(iterator))
        raise ModelError(
            f"{self._named(*place)} is or holds {kind_of_iterator(iterator)}, from which its forward takes: "
            "recomputed, it would take something else",
            expected="a recomputed block to find again what it found, which an iterator, a file or the system's "
            "randomness cannot give twice",
            fix=_FIX,
        )

    def _refuse_uncopied(self, tables: list[Table], snapshot: Snapshot | None) -> None:
        """Refuse a tensor that began to change late, or is too large: what it was is lost."""
        changed = [(at, name) for at, name, tensor, version in self._marks if version_of(tensor) != version]
        if snapshot is not None and not changed and (lost := snapshot.changed_tensors() - snapshot.copies.keys()):
            changed = [self._holder(tables, lambda value: snapshot.reaches(value, lost))]
        if changed and self._refuses:
            raise ModelError(
                f"{self._named(*changed[0])} is or holds a tensor that its forward changes in place, of more than "
                f"{MOST_BYTES >> 20} MiB or not in earlier steps",
                expected="a recomputed block to do the same in every step",
                fix=_FIX,
            )

    @staticmethod
    def _holder(tables: list[Table], holds: Callable[[Any], bool]) -> tuple[int, str]:
        """Return the attribute that holds something: its module's number, and its name."""
        return next(
            (at, name) for at, table in enumerate(tables) for name, value in own_values(table).items() if holds(value)
        )

    def _named(self, at: int, name: str) -> str:
        return self._owners[at].named(name)


def _may_change(value: Any) -> bool:
    return can_be_used_up(value) or kind_of(value) is not None
