"""All tensors of a model, each once, under every name that it has, and where in the modules it stands.

A parameter that two modules share (an embedding and the head tied to it) is one entry with two names and two places.
Its owner is the module where it stands first. Names are those of the unsplit model, so an entry is called the same on
every rank, whatever the cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from drumline.runtime.blocks.cut import Block


@dataclass(frozen=True, slots=True)
class Place:
    """A slot of a module for a parameter or a buffer."""

    module: nn.Module
    slot: str

    @property
    def table(self) -> dict[str, Tensor | None]:
        """The module's table that the slot is in."""
        tables: tuple[dict[str, Tensor | None], ...] = (self.module._parameters, self.module._buffers)  # type: ignore[assignment]
        return next(table for table in tables if self.slot in table)

    @property
    def saved(self) -> bool:
        """Whether what stands here belongs to the state that is saved."""
        return self.slot not in self.module._non_persistent_buffers_set


@dataclass(slots=True, eq=False)
class Entry:
    """One tensor, its names and its places, first the owner's."""

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The first name."""
        return self.names[0]

    @property
    def owner(self) -> nn.Module:
        """The module where the tensor stands first."""
        return self.places[0].module

    @property
    def saved(self) -> bool:
        """Whether files of weights hold it, as the owner says."""
        return self.places[0].saved

    @property
    def kind(self) -> str:
        """What it is, in words."""
        return "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"

    def put(self, tensor: Tensor) -> None:
        """Let another tensor stand in all places."""
        for place in self.places:
            place.table[place.slot] = tensor
        self.tensor = tensor


class Catalogue:
    """The tensors and modules of some blocks, and of the model that they were cut from.

    >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False))
    >>> model[2].weight = model[0].weight
    >>> [entry.names for entry in Catalogue([Block("", model, "")]).entries]
    [['0.weight', '2.weight']]
    """

    def __init__(self, blocks: Sequence[Block], root: nn.Module | None = None) -> None:
        self.root = root
        self.blocks = list(blocks)
        tops = [] if root is None else [("", root)]
        tops += [(block.name if block.prefix is None else block.prefix, block.module) for block in blocks]
        self.modules: dict[nn.Module, str] = {}  # by first name, parents first
        found: dict[int, Entry] = {}
        for prefix, top in tops:
            for path, module in top.named_modules(prefix=prefix, remove_duplicate=False):
                known = self.modules.setdefault(module, path)
                for slot, tensor in _direct(module):
                    entry = found.setdefault(id(tensor), Entry(tensor))
                    name = f"{path}.{slot}" if path else slot
                    if name not in entry.names:
                        entry.names.append(name)
                    if known == path and Place(module, slot) not in entry.places:
                        entry.places.append(Place(module, slot))
        self.entries = list(found.values())

    def of(self, blocks: Iterable[Block]) -> list[Entry]:
        """Return the entries that some of the blocks hold."""
        held = {id(one) for block in blocks for module in block.module.modules() for _, one in _direct(module)}
        return [entry for entry in self.entries if id(entry.tensor) in held]


def _direct(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a module holds itself."""
    for table in (module._parameters, module._buffers):
        yield from ((slot, one) for slot, one in table.items() if one is not None)


def with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like one on the meta device, with memory: a parameter stays one, with all that was said of it."""
    made = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    made.__dict__.update({name: one for name, one in tensor.__dict__.items() if name != "_is_hf_initialized"})
    return made
