"""Runs of blocks that leave nothing behind: the check of a step, and measuring.

What iterators gave meanwhile comes again: a stand-in in their place gives it before it goes on with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from io import IOBase
from typing import Any

from torch import nn

from drumline.model.kept_state.snapshot import MOST_BYTES, Snapshot
from drumline.model.kept_state.spaces import Held, Table, fill, own_values, spaces_in
from drumline.model.kept_state.spies import Repeats, Spies, Spy, original_of


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


@contextmanager
def surroundings_as_before(modules: Iterable[nn.Module]) -> Iterator[None]:
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
    every = list(spaces_in("", [("", module) for module in modules], set()))
    spaces = [space.table for space in every if not space.is_module]
    tables = [space.copy() for space in spaces]
    outside = [value for table in tables for value in table.values()]
    inside = [value for space in every if space.is_module for value in own_values(space.table.copy()).values()]
    with _taken_back(Snapshot([*outside, *inside], most_bytes=MOST_BYTES), spaces, tables, Spy):
        yield


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
