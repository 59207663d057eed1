"""State beside parameters and buffers that blocks of several stages reach: one list, one global, one module.

::

    CALLS = [0]                                   blocks 1 and 4 count in it, and are in different stages
    self.noise = noise                            one generator, given to several blocks
    self.mean = means[0]                          views of the same numbers
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from types import CodeType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from drumline.engine.state.own_entries import Keys, are_apart, keys_of
from drumline.model.block import Block
from drumline.model.kept_state.code import is_only_opened, is_only_written
from drumline.model.kept_state.outside import OuterPlace
from drumline.model.kept_state.snapshot import Snapshot
from drumline.model.kept_state.spaces import Space, own_values, spaces_of
from drumline.model.randomness import may_draw

Identity = Any  # of a place, of memory, or the id of an object


class _Reach(NamedTuple):
    names: frozenset[str]  # under which a block reaches something
    code: tuple[CodeType, ...]  # of the block
    keys: Keys = None  # the entries that the block uses of it, if it is a dict


def name_of(key: Any) -> str:
    """Return by what name code mentions a place."""
    return key.name if isinstance(key, OuterPlace) else str(key)


def is_written_by(code: Collection[CodeType], names: Iterable[str], fields: Collection[str] = ()) -> bool:
    """Whether code only writes what has these names, or the fields of it that change."""
    return all(
        all(is_only_written(part, name) for part in code)
        or (bool(fields) and all(is_only_opened(part, name) for part in code) and is_written_by(code, fields))
        for name in names
    )


class Sharing:
    """What several blocks of a model reach, each from its own code."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        blocks = list(blocks)
        reached: dict[Identity, dict[str, _Reach]] = defaultdict(dict)
        self._alive: list[Any] = []  # so that no identity is used again
        each = {block.name: spaces_of([block]) for block in blocks if may_draw(block.module)}
        values = [
            value for spaces in each.values() for space in spaces for value in own_values(space.table.copy()).values()
        ]
        self._memory = _overlaps(values if len(each) > 1 else ())
        tables = {id(value) for value in values if type(value) is dict}
        indirect = set[tuple[Identity, str]]()  # tables that are in something else, and a block that reaches them so
        for name, spaces in each.items() if len(each) > 1 else ():
            for at in spaces[0].reads if spaces else ():
                reached[at][name] = _Reach(frozenset({at[1]} - {""}), spaces[0].code)
            for space in spaces:
                for key, value in own_values(space.table.copy()).items():
                    for identity in (space.identity(key), *self.identities_in(value)):
                        if identity in tables and identity != id(value):
                            indirect.add((identity, name))
                        before = reached[identity].get(name, _Reach(frozenset(), space.code))
                        reached[identity][name] = before._replace(names=before.names | {name_of(key)})
            self._alive.append(spaces)
        self._reached = {identity: blocks for identity, blocks in reached.items() if len(blocks) > 1}
        self._modules = {block.name: ref(block.module) for block in blocks if tables and block.name in each}
        for identity in tables & self._reached.keys():
            for name, reach in self._reached[identity].items():
                if (identity, name) not in indirect:
                    self._reached[identity][name] = reach._replace(keys=self._keys_now(name, reach))
        shared = set(self._reached)
        names = {name for blocks in self._reached.values() for name in blocks}
        self._alive = [self._values_with(space, shared) for name in names for space in each[name]]

    def identities_in(self, value: Any) -> set[Identity]:
        """Return the identities of what a value holds that can change, and of the memory that tensors in it use."""
        snapshot = Snapshot([value], most_bytes=-1)
        return self.with_memory({*snapshot.objects, *snapshot.tensors, *snapshot.iterators})

    def with_memory(self, objects: Iterable[int]) -> set[Identity]:
        """Return the identities of objects, and of the memory of those that are views of the same numbers."""
        ids = set(objects)
        return ids | {self._memory[at] for at in ids & self._memory.keys()}

    def between(self, homes: dict[str, int]) -> set[Identity]:
        """Return what blocks of several stages reach; `homes` are the stages of all blocks."""
        return {identity for identity, blocks in self._reached.items() if len({homes.get(name) for name in blocks}) > 1}

    def blocks_of(self, identity: Identity) -> list[str]:
        """Return the blocks that reach something."""
        return list(self._reached[identity])

    def is_read_elsewhere(self, identity: Identity, here: set[str]) -> bool:
        """Whether blocks that are not `here` read something by code that blocks here do not have."""
        reach = self._reached[identity]
        own_code = {code for name, part in reach.items() if name in here for code in part.code}
        return any(
            name in (*code.co_names, *code.co_freevars) and not is_only_written(code, name)
            for block, part in reach.items()
            if block not in here
            for code in part.code
            if code not in own_code
            for name in part.names
        )

    def are_own_entries(self, table: Any, identities: Iterable[Identity], homes: dict[str, int]) -> bool:
        """Whether blocks of each stage use entries of their own in a dict, and reach in no other way what is in it."""
        if type(table) is not dict or id(table) not in self._reached:
            return False
        reach = self._reached[id(table)]
        inside = [self.identities_in(value) for value in table.values()]
        return (
            all(part.keys is not None and part.keys == self._keys_now(name, part) for name, part in reach.items())
            and are_apart((homes.get(name), part.keys) for name, part in reach.items())
            and sum(map(len, inside)) == len(set().union(*inside))
            and all(
                name in reach and part.names <= reach[name].names
                for identity in {*identities, *self._reached.keys() & set().union(*inside)}
                for name, part in self._reached[identity].items()
            )
        )

    def _keys_now(self, name: str, reach: _Reach) -> Keys:
        """Return the entries that a block uses now, or those of before if it has gone to another process."""
        module = self._modules[name]()
        return reach.keys if module is None else keys_of(module, reach.code, reach.names)

    def reaches_of(self, identity: Identity) -> list[tuple[frozenset[str], tuple[CodeType, ...]]]:
        """Return by what names each block reaches something, and its code."""
        return [(reach.names, reach.code) for reach in self._reached[identity].values()]

    def _values_with(self, space: Space, shared: set[Identity]) -> list[Any]:
        values = own_values(space.table.copy()).items()
        return [
            value
            for key, value in values
            if space.identity(key) in shared or not shared.isdisjoint(self.identities_in(value))
        ]


def _overlaps(values: Iterable[Any]) -> dict[int, Identity]:
    """Return, by their ids, what to call the memory of tensors in which other tensors have numbers, too."""
    tensors = [tensor for tensor, _ in Snapshot(values, most_bytes=-1).tensors.values()]
    plain = [tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter) and tensor.numel()]
    strided = [tensor for tensor in plain if tensor.layout is torch.strided]
    spans = sorted(((*_span(tensor), id(tensor)) for tensor in strided), key=lambda span: span[:3])
    memory: dict[int, Identity] = {}
    last = 0, 0, 0  # a storage, and a span of it
    for storage, start, end, number in spans:
        is_beside = storage != last[0] or start >= last[2]
        last = (storage, start, end) if is_beside else (storage, last[1], max(end, last[2]))
        memory[number] = "memory", *last[:2]
    names = Counter(memory.values())
    return {number: name for number, name in memory.items() if names[name] > 1}


def _span(tensor: Tensor) -> tuple[int, int, int]:
    """Return a tensor's storage, and where in it the tensor's numbers begin and end."""
    length = int(1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return tensor.untyped_storage()._cdata, start, start + length * tensor.itemsize
