"""State beside parameters and buffers that blocks of several stages reach: one list, one global, one module.

CALLS = [0]                                       blocks 1 and 4 count in it, and are in different stages
self.noise = noise                                one generator, given to several blocks
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from types import CodeType
from typing import Any, NamedTuple

from drumline.model.block import Block
from drumline.model.kept_state.code import is_only_written
from drumline.model.kept_state.outside import Place
from drumline.model.kept_state.snapshot import Snapshot
from drumline.model.kept_state.spaces import Space, own_values, spaces_of
from drumline.model.randomness import may_draw

Identity = Any  # of a place, or the id of an object


class _Reach(NamedTuple):
    names: frozenset[str]  # under which a block reaches something
    code: tuple[CodeType, ...]  # of the block


def name_of(key: Any) -> str:
    """Return by what name code mentions a place."""
    return key.name if isinstance(key, Place) else str(key)


class Sharing:
    """What several blocks of a model reach, each from its own code."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        reached: dict[Identity, dict[str, _Reach]] = defaultdict(dict)
        self._alive: list[Any] = []  # so that no identity is used again
        each = {block.name: spaces_of([block]) for block in blocks if may_draw(block.module)}
        for name, spaces in each.items() if len(each) > 1 else ():
            for at in spaces[0].reads if spaces else ():
                reached[at][name] = _Reach(frozenset({at[1]} - {""}), spaces[0].code)
            for space in spaces:
                for key, value in own_values(space.table.copy()).items():
                    for identity in (space.identity(key), *_objects_in(value)):
                        before = reached[identity].get(name, _Reach(frozenset(), space.code))
                        reached[identity][name] = before._replace(names=before.names | {name_of(key)})
            self._alive.append(spaces)
        self._reached = {identity: blocks for identity, blocks in reached.items() if len(blocks) > 1}
        shared = set(self._reached)
        names = {name for blocks in self._reached.values() for name in blocks}
        self._alive = [_held(space, shared) for name in names for space in each[name]]

    def between(self, homes: dict[str, int]) -> set[Identity]:
        """Return what blocks of several stages reach; `homes` are the stages of all blocks."""
        return {identity for identity, blocks in self._reached.items() if len({homes.get(name) for name in blocks}) > 1}

    def blocks_of(self, identity: Identity) -> list[str]:
        """Return the blocks that reach something."""
        return list(self._reached[identity])

    def is_read_elsewhere(self, identity: Identity, here: set[str]) -> bool:
        """Whether blocks that are not `here` read something by code that blocks here do not have."""
        reach = self._reached[identity]
        own = {code for name, (_, codes) in reach.items() if name in here for code in codes}
        return any(
            name in (*code.co_names, *code.co_freevars) and not is_only_written(code, name)
            for block, (names, codes) in reach.items()
            if block not in here
            for code in codes
            if code not in own
            for name in names
        )

    def code_of(self, identity: Identity) -> list[CodeType]:
        """Return the code of all blocks that reach something."""
        return [code for reach in self._reached[identity].values() for code in reach.code]


def _objects_in(value: Any) -> set[int]:
    """Return the identities of what a value holds that can change."""
    snapshot = Snapshot([value], most_bytes=-1)
    return {*snapshot.objects, *snapshot.tensors, *snapshot.iterators}


def _held(space: Space, shared: set[Identity]) -> list[Any]:
    values = own_values(space.table.copy()).items()
    return [
        value for key, value in values if space.identity(key) in shared or not shared.isdisjoint(_objects_in(value))
    ]
