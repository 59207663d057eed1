"""All places where blocks may keep something beside registered parameters and buffers, with a name for each.

    attributes of their modules
    modules that these hold in lists, with their weights and buffers
    variables outside of modules: see outside.py

Modules of torch.nn keep nothing that a forward changes, except what a hook or another forward does to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from types import CodeType
from typing import Any, NamedTuple

from torch import nn

from drumline.model.block import Block
from drumline.model.catalogue import whole_name
from drumline.model.kept_state.outside import CodeWalk, OuterPlace, Outside, hooks_of_parameters
from drumline.model.watch.watch import has_hooks

TORCHS_OWN = frozenset(vars(nn.Module()))
Held = dict[Any, Any] | Outside  # what has places: a module's attributes, or variables outside
Table = dict[Any, Any]  # what is kept, by attribute or place


class Space(NamedTuple):
    """Places with one owner: a module's attributes, its frozen parameters, or variables outside of modules."""

    block: str
    module: str
    table: Held
    is_module: bool = True
    code: tuple[CodeType, ...] = ()  # of the block
    reads: frozenset[tuple[int, str]] = frozenset()  # the variables that this names

    def named(self, key: Any) -> str:
        """Return what to call a place in an error."""
        if isinstance(key, OuterPlace):
            return f"the {key.label} of block {self.block!r}"
        return f"the attribute {self.path(key)!r} of block {self.block!r}"

    def label(self, key: Any) -> str:
        """Return what to call a place of a block that is named already."""
        return str(key.label) if isinstance(key, OuterPlace) else self.path(key)

    def path(self, key: str) -> str:
        """Return the name of an attribute in its block."""
        return whole_name(self.module, key).removeprefix(f"{self.block}.")

    def identity(self, key: Any) -> tuple[int, str]:
        """Return what a place is called wherever it is found."""
        return key.key if isinstance(key, OuterPlace) else (id(self.table), key)


def spaces_of(blocks: Iterable[Block]) -> list[Space]:
    """Return the places where blocks may keep something; each once, for the first block that reaches it."""
    spaces, visited = list[Space](), set[tuple[int, str]]()
    for block in blocks:
        spaces += spaces_in(block.name, list(block.module.named_modules()), visited)
    return spaces


def spaces_in(block: str, named: Sequence[tuple[str, nn.Module]], visited: set[tuple[int, str]]) -> Iterator[Space]:
    """Yield the places of some modules but those that were `visited`, and add them there."""
    users = [(name, module) for name, module in named if may_keep(module)]
    if not users and not any(hooks_of_parameters(module) for _, module in named):
        return
    walk = CodeWalk(module for _, module in named)
    code = tuple(function.__code__ for function in walk.functions.values()), walk.reads
    for name, module in users:
        yield Space(block, name, vars(module), True, *code)
    for module, via in walk.hidden.values():
        for table in (vars(module), module._parameters, module._buffers):
            if table and (id(table), "") not in visited:
                visited.add((id(table), ""))
                yield Space(block, via, table, table is vars(module), *code)
    places = [place for place in walk.places if place.key not in visited]
    visited |= {place.key for place in places}
    if places:
        yield Space(block, "", Outside(places), False, *code)


def own_values(attributes: Table) -> Table:
    """Return the attributes of a module that are not torch's own tables.

    >>> layer = nn.ReLU(); layer.calls = 1
    >>> own_values(vars(layer))
    {'inplace': False, 'calls': 1}
    """
    return {name: value for name, value in attributes.items() if name not in TORCHS_OWN}


def may_keep(module: nn.Module) -> bool:
    """Whether a forward may change attributes of a module."""
    library = type(module).__module__.partition(".")[0]
    return library != "drumline" and (
        not type(module).__module__.startswith("torch.nn.modules") or has_hooks(module) or "forward" in vars(module)
    )


def is_same_table(table: Table, space: Held) -> bool:
    """Whether a module, or variables, still hold the same objects."""
    return len(table) == len(space) and all(map(is_, table.values(), space.values()))


def fill(space: Held, table: Table) -> None:
    """Let a module have these attributes and no others."""
    for name in [name for name in space if name not in table]:
        del space[name]
    space.update(table)


def places_in(spaces: Iterable[Space]) -> Iterator[tuple[Space, Any]]:
    """Yield every place."""
    for space in spaces:
        for key in space.table:
            if key not in TORCHS_OWN:
                yield space, key
