"""All tensors of a model, each once with all of its names, and its places in the modules.

A parameter that two modules share (an embedding and the head tied to it) is one entry with two names and two places.
Its owner is the module of its first place. Names are those of the unsplit model, so an entry has the same name on every
rank, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drumline.model.block import Block
from drumline.model.quantised.packed import is_packed, mapped_parts


class Place(NamedTuple):
    """A slot of a module for a parameter or a buffer, and its name in the unsplit model."""

    name: str
    module: nn.Module
    key: str
    is_parameter: bool

    @property
    def table(self) -> dict[str, Any]:
        """The module's table that contains the slot."""
        return self.module._parameters if self.is_parameter else self.module._buffers

    @property
    def tensor(self) -> Tensor | None:
        """The current tensor."""
        return self.table.get(self.key)

    @property
    def saved(self) -> bool:
        """Whether the tensor here belongs to the saved state."""
        return self.key not in self.module._non_persistent_buffers_set


def places_in(block: Block) -> Iterator[Place]:
    """Yield the places of a block's tensors; a tensor in several places once for each.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> [place.name for place in places_in(Block("3", nn.Sequential(layer, layer)))]
    ['3.0.weight', '3.1.weight']
    """
    prefix = block.name if block.prefix is None else block.prefix
    for path, module in block.module.named_modules(prefix=prefix, remove_duplicate=False):
        for is_parameter, table in ((True, module._parameters), (False, module._buffers)):
            for key, tensor in table.items():
                if tensor is not None:
                    yield Place(whole_name(path, key), module, key, is_parameter)


def whole_name(path: str, key: str) -> str:
    """Return the full name of what a module at a path holds; the model's own path is empty.

    >>> whole_name("layers.0", "weight"), whole_name("", "weight")
    ('layers.0.weight', 'weight')
    """
    return f"{path}.{key}" if path else key


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return a model's parameters and then its buffers, each with every name that it has."""
    return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]


@dataclass(slots=True, eq=False)
class Entry:
    """One tensor, its names and its places, the owner's first."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def owner(self) -> nn.Module:
        """The module of the tensor's first place."""
        return self.places[0].module

    @property
    def saved(self) -> bool:
        """Whether weights files contain it, as the owner says."""
        return self.places[0].saved

    @property
    def kind(self) -> str:
        """Its kind, in words."""
        return "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"

    def put(self, tensor: Tensor) -> None:
        """Put another tensor into all places."""
        for place in self.places:
            place.table[place.key] = tensor
        self.tensor = tensor


class Catalogue:
    """The tensors and modules of some blocks, and of the model from which they were cut.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    >>> model[2].weight = model[0].weight
    >>> [entry.names for entry in Catalogue([Block("", model, "")]).entries]
    [['0.weight', '2.weight']]
    """

    def __init__(self, blocks: Sequence[Block], root: nn.Module | None = None) -> None:
        self.root = root
        self.blocks = list(blocks)
        self.modules: dict[nn.Module, str] = {}  # by first name, parents first
        entries: dict[int, Entry] = {}
        for top in [*([] if root is None else [Block("", root)]), *blocks]:
            prefix = top.name if top.prefix is None else top.prefix
            for path, module in top.module.named_modules(prefix=prefix, remove_duplicate=False):
                self.modules.setdefault(module, path)
            for place in places_in(top):
                assert place.tensor is not None
                entry = entries.setdefault(id(place.tensor), Entry(place.tensor))
                if place.name not in entry.names:
                    entry.names.append(place.name)
                if place.name == whole_name(self.modules[place.module], place.key) and place not in entry.places:
                    entry.places.append(place)
        self.entries = list(entries.values())

    def of(self, blocks: Iterable[Block]) -> list[Entry]:
        """Return the entries that some of the blocks hold."""
        held_ids = {id(place.tensor) for block in blocks for place in places_in(block)}
        return [entry for entry in self.entries if id(entry.tensor) in held_ids]


def with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with memory like one on the meta device; a parameter stays one, with all its settings."""
    if is_packed(tensor):
        return mapped_parts(tensor, partial(torch.empty_like, device=device))
    new_tensor = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        new_tensor = torch.Tensor._make_subclass(type(tensor), new_tensor, tensor.requires_grad)
    new_tensor.__dict__.update({name: value for name, value in tensor.__dict__.items() if name != "_is_hf_initialized"})
    return new_tensor
