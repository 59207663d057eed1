"""Runs of blocks that leave nothing behind: the check of a step, and measuring.

What iterators gave meanwhile comes again: a stand-in in their place gives it before it goes on with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from io import IOBase
from typing import Any

from torch import nn

from drumline.model.kept_state.snapshot import MOST_BYTES, Snapshot
from drumline.model.kept_state.spaces import Held, Table, fill, own_values, spaces_in
from drumline.model.kept_state.spies import Repeats, Spies, Spy


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
    spies = Spies(snapshot, spaces, Repeats if measuring else Spy) if snapshot.iterators else None
    with ExitStack() as stack:
        for value, _ in snapshot.iterators.values():
            if isinstance(value, IOBase) and value.seekable():
                stack.callback(value.seek, _position(value))
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


@contextmanager
def surroundings_as_before(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let what modules reach outside of their attributes hold afterwards what it held; iterators go on.

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
    spaces = spaces_in("", [("", module) for module in modules], set())
    tables, values = list[tuple[Held, Table]](), list[Any]()
    for space in spaces:
        table = space.table.copy()
        values += own_values(table).values()
        if not space.is_module:
            tables.append((space.table, table))
    snapshot = Snapshot(values, most_bytes=MOST_BYTES)
    try:
        yield
    finally:
        snapshot.rewind()
        for held, table in tables:
            fill(held, table)


def _position(file: Any) -> int:
    return int(file.tell())
