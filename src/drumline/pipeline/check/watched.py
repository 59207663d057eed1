"""Check the user's model before every step: changes are traced again, or refused."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ref

from torch import nn

from drumline.runtime.blocks.cut import Block
from drumline.runtime.blocks.pieces import Piece
from drumline.runtime.watch.watch import Watch, refuse_hooks


class Watched:
    """A model and its blocks, held by weak references."""

    def __init__(self, model: object, cuts: Sequence[Sequence[Block]]) -> None:
        blocks = [block for stage in cuts for block in stage]
        pieces = [block.module for block in blocks if isinstance(block.module, Piece)]
        self._plans = list({id(piece.script): piece.script for piece in pieces}.values())
        self._chain = None if self._plans else Watch(_modules_of(blocks), frozenset())
        self._root = ref(model) if isinstance(model, nn.Sequential) and not self._plans else None

    def begin(self) -> None:
        """Record the current state as the expected one, after all parameters are in place."""
        for plan in self._plans:
            plan.begin()

    def look(self) -> None:
        """Refuse changes that cannot be traced; others are traced again at the next run."""
        for plan in self._plans:
            plan.renew()
        if self._chain is not None:
            self._chain.refuse_exchanged()
        root = None if self._root is None else self._root()
        if root is not None:
            refuse_hooks(root)


def _modules_of(blocks: Sequence[Block]) -> list[tuple[str, nn.Module]]:
    return [pair for block in blocks for pair in block.module.named_modules(prefix=block.name)]
