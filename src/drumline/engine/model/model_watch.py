"""Check the user's model before every step: changes are traced again, or refused.

::

    a model that is traced      see model/watch
    an nn.Sequential, a list    blocks that are exchanged or appended, and what the whole would do beside calling them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import ref

from torch import nn

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.watch.watch import Watch, global_hooks, refuse_hooks


class WatchedModel:
    """A model and its blocks, held by weak references.

    A plain list or dict of blocks has none; where this process holds all blocks anyway, it is held itself.
    """

    def __init__(self, model: object, cuts: Sequence[Sequence[Block]], *, alone: bool = False) -> None:
        blocks = [block for stage in cuts for block in stage]
        pieces = [block.module for block in blocks if isinstance(block.module, Piece)]
        self._plans = list({id(piece.script): piece.script for piece in pieces}.values())
        root = model if isinstance(model, nn.Module) and not self._plans else None
        modules = _modules_of(blocks) if root is None else [*root.named_modules()]
        self._chain = None if self._plans else Watch(modules, frozenset())
        self._root = None if root is None else ref(root)
        self._whole = _whole_of(root)
        self._global = global_hooks()
        is_listed = alone and not self._plans and isinstance(model, Sequence | Mapping)
        self._list: Any = model if is_listed else None
        self._listed = _entries(self._list)

    def begin(self) -> None:
        """Record the current state as the expected one, after all parameters are in place."""
        for plan in self._plans:
            plan.begin()

    def look(self) -> bool:
        """Return whether anything has changed, which is traced again at the next run; refuse what cannot be traced."""
        renewed = [plan.renew() for plan in self._plans]
        if self._chain is None:
            return any(renewed)
        self._chain.refuse_exchanged()
        root = None if self._root is None else self._root()
        if root is not None and isinstance(root, nn.Sequential):
            refuse_hooks(root)
            if _whole_of(root) != self._whole:
                raise ModelError(
                    "the model's own forward, its __call__ or its class was exchanged after the pipeline was created, "
                    "and no stage would run it",
                    expected="the nn.Sequential that the pipeline was given, whose blocks run one after another",
                    fix="exchange it before you create the pipeline: the first step then checks it",
                )
        if self._list is not None and _entries(self._list) != self._listed:
            raise ModelError(
                "blocks of the list were replaced, added or removed after the pipeline was created",
                expected="the blocks with which the model was cut",
                fix="create a new pipeline",
            )
        before, self._global = self._global, global_hooks()
        return before != self._global


def _whole_of(root: nn.Module | None) -> list[Any]:
    """Return what runs when a model is called, beside its blocks and its hooks."""
    if root is None:
        return []
    kind = type(root)
    return [kind, kind.__call__, kind.forward, vars(root).get("forward")]


def _entries(blocks: Any) -> list[Any]:
    if blocks is None:
        return []
    return [*map(id, blocks.values() if isinstance(blocks, Mapping) else blocks)]


def _modules_of(blocks: Sequence[Block]) -> list[tuple[str, nn.Module]]:
    return [pair for block in blocks for pair in block.module.named_modules(prefix=block.name)]
