"""Where the blocks of a model are: which of its modules are blocks, and which of them this process trains."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from drumline.engine.stages.assembly import LossHolder
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece


@dataclass(frozen=True, slots=True)
class Places:
    """Which modules are blocks, and which parameters and buffers the forward uses between them."""

    blocks: tuple[str, ...]
    between: tuple[str, ...]

    @staticmethod
    def of(blocks: Iterable[Block]) -> Places:
        """Return those of a traced model's pieces, or the blocks of a list."""
        listed = [block for block in blocks if not isinstance(block.module, LossHolder)]
        pieces = [block.module for block in listed if isinstance(block.module, Piece)]
        if not pieces:
            return Places(tuple(dict.fromkeys(block.name for block in listed)), ())
        callees = dict.fromkeys(name for piece in pieces for name in piece.callees)
        lent = dict.fromkeys(name for piece in pieces for name in piece.homes)
        return Places(tuple(callees), tuple(lent))


@dataclass(frozen=True, slots=True)
class Home:
    """What this process trains of a traced model: its blocks and what it uses between blocks, by name."""

    modules: Mapping[str, nn.Module]
    between: Mapping[str, Tensor]
    tensor_ids: frozenset[int]  # ids of all tensors of these

    @staticmethod
    def of(blocks: Iterable[Block]) -> Home:
        """Return that of the pieces in this process."""
        pieces = [block.module for block in blocks if isinstance(block.module, Piece)]
        modules = {name: piece.get_submodule(name) for piece in pieces for name in piece.callees}
        homes = {name: home for piece in pieces for name, home in piece.homes.items()}
        tables = {name: (*home._parameters.items(), *home._buffers.items()) for name, home in homes.items()}
        between = {name: dict(each)[name.rpartition(".")[2]] for name, each in tables.items()}
        tensors = [each for piece in pieces for each in (*piece.parameters(), *piece.buffers())]
        kept_tensors = {name: tensor for name, tensor in between.items() if tensor is not None}
        return Home(modules, kept_tensors, frozenset(map(id, tensors)))
