"""Runs of blocks that leave nothing behind: the check of a step, and measuring.

What iterators gave meanwhile comes again: a stand-in in their place gives it before it goes on with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import IOBase
from typing import Any

from torch import Tensor, nn

from drumline.model.kept_state.snapshot import MOST_BYTES, Snapshot, version_of
from drumline.model.kept_state.spaces import Held, Table, fill, is_same_table, own_values, spaces_in
from drumline.model.kept_state.spies import Repeats, Spies, Spy, original_of

_NOTHING = Snapshot((), most_bytes=-1)


@contextmanager
def as_before(modules: Iterable[nn.Module], *, measuring: bool = False) -> Iterator[None]:
    """Let modules keep afterwards what they kept before, wherever their code keeps it.

    While `measuring`, an iterator gives one item again and again.

    >>> layer = nn.ReLU(); layer.words = iter("abc"); layer.register_forward_hook(lambda *_: None)
    <...>
    >>> with as_before([layer]):
    ...     taken = next(layer.words)
    >>> taken, list(layer.words)
    ('a', ['a', 'b', 'c'])
    """
    spaces = [space.table for space in spaces_in("", [("", module) for module in modules], set())]
    tables = [space.copy() for space in spaces]
    snapshot = Snapshot((value for table in tables for value in own_values(table).values()), most_bytes=MOST_BYTES)
    with _taken_back(snapshot, spaces, tables, Repeats if measuring else Spy):
        yield


class StateBefore:
    """What blocks kept when a forward began, for its recomputation: later forwards may have changed it, too."""

    __slots__ = ("snapshot", "spaces", "tables")

    def __init__(self, spaces: Sequence[Held], tables: Sequence[Table], snapshot: Snapshot | None) -> None:
        self.spaces = spaces
        self.tables = tables
        self.snapshot = snapshot

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Let blocks keep inside what they kept then; afterwards what they keep now."""
        now = [space.copy() for space in self.spaces]
        snapshot = _NOTHING if self.snapshot is None else self.snapshot
        try:
            for space, table in zip(self.spaces, self.tables, strict=True):
                if snapshot.copies or not is_same_table(table, space):
                    fill(space, {name: snapshot.stand_in(value) for name, value in table.items()})
            with snapshot.put_in():
                yield
        finally:
            for space, table in zip(self.spaces, now, strict=True):
                if not is_same_table(table, space):
                    fill(space, table)


class Beginning:
    """What modules kept when a run on copies of them began, in attributes and wherever else their code keeps it.

    >>> __name__ = "mine"  # not a part of this library
    >>> seen = []
    >>> layer = nn.Linear(1, 1); layer.register_forward_hook(lambda *_: seen.append(1))
    <...>
    >>> with surroundings_as_before([layer]) as beginning:
    ...     output = layer(layer.bias)
    ...     with beginning.put_in():
    ...         print(seen)
    ...     print(seen)
    []
    [1]
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.every = list(spaces_in("", [("", module) for module in modules], set()))
        self.tables: list[Table] = [space.table.copy() for space in self.every]
        values = (value for table in self.tables for value in own_values(table).values())
        self.snapshot = Snapshot(values, most_bytes=MOST_BYTES)
        self._originals = {id(copy): (at, version_of(copy)) for at, copy in self.snapshot.copies.items()}

    @property
    def can_be_put_in(self) -> bool:
        """Whether all of it can be put in again: what an iterator gave cannot."""
        return not self.snapshot.iterators

    @contextmanager
    def put_in(self) -> Iterator[None]:
        """Let everybody keep inside what they kept then; afterwards what they keep now."""
        with StateBefore([space.table for space in self.every], self.tables, self.snapshot).put_in():
            yield

    def identity(self, tensor: Tensor) -> int:
        """Return the same number for a tensor and its copy, while they have the numbers of the beginning; else 0."""
        at, version = self._originals.get(id(tensor), (0, -1))
        _, version = self.snapshot.tensors.get(id(tensor), (None, version))
        return (at or id(tensor)) if version_of(tensor) == version else 0


@contextmanager
def surroundings_as_before(modules: Iterable[nn.Module]) -> Iterator[Beginning]:
    """Let what modules reach outside of their attributes hold afterwards what it held, wherever it is.

    So with what their attributes hold, but not with these themselves: for runs on copies of modules.

    >>> __name__ = "mine"  # not a part of this library
    >>> seen = []
    >>> layer = nn.Linear(1, 1); layer.register_forward_hook(lambda *_: seen.append(1))
    <...>
    >>> with surroundings_as_before([layer]):
    ...     output = layer(layer.bias)
    >>> seen
    []
    """
    beginning = Beginning(modules)
    outside = [
        (space.table, table)
        for space, table in zip(beginning.every, beginning.tables, strict=True)
        if not space.is_module
    ]
    with _taken_back(beginning.snapshot, [space for space, _ in outside], [table for _, table in outside], Spy):
        yield beginning


@contextmanager
def _taken_back(snapshot: Snapshot, spaces: Sequence[Held], tables: Sequence[Table], kind: type[Spy]) -> Iterator[None]:
    """Restore what was taken of some places, and what these held."""
    spies = Spies(snapshot, spaces, kind) if snapshot.iterators else None
    with ExitStack() as stack:
        for value, _ in snapshot.iterators.values():
            file = original_of(value)
            if isinstance(file, IOBase) and file.seekable():
                stack.callback(file.seek, _position(file))
        try:
            yield
        finally:
            if spies is not None:
                spies.leave()
            snapshot.rewind()
            for space, table in zip(spaces, tables, strict=True):
                fill(space, table)
            if spies is not None:
                spies.give_back()


def _position(file: Any) -> int:
    return int(file.tell())
