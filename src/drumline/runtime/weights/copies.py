"""Blocks of one rank as copies, where another rank of the same process is home to tensors in them.

Between processes every rank has a model of its own. Ranks that take turns in one process have one model between them,
so whatever several of them hold is copied: all of a stage's second copy, and tied tensors, whose blocks otherwise keep
the user's own. The copies are not the user's: before every step they follow what he has.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.blocks.cut import Block
from drumline.runtime.blocks.pieces import Piece
from drumline.runtime.follow.ambient import HOOKS
from drumline.runtime.watch.fingerprint import PLAIN, fingerprint
from drumline.runtime.weights.catalogue import places_in
from drumline.runtime.weights.tied import Ties

Table = dict[str, Any]
_OWN = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", *HOOKS})


class Copies:
    """The copies of one rank.

    >>> from drumline.core.placement import Placement
    >>> first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> last.weight = first.weight
    >>> cuts = [[Block("0", first)], [Block("1", last)]]
    >>> (made,) = Copies(1, Ties(cuts, Placement.linear(2)), cuts).of(1, cuts[1])
    >>> made.module.weight is last.weight, made.module.bias is last.bias
    (False, True)
    """

    def __init__(self, rank: int, ties: Ties, cuts: Sequence[Sequence[Block]]) -> None:
        self.rank = rank
        self.ties = ties
        own = (
            place.tensor
            for stage, blocks in enumerate(cuts)
            for block in blocks
            for place in places_in(block)
            if ties.home(place.name, stage) == rank
        )
        self._memo: dict[int, Any] = {id(tensor): tensor for tensor in own}
        self._tables: list[
            tuple[str, Table, Table, frozenset[str]]
        ] = []  # the user's, ours, and what they have in common
        self._modules: list[tuple[nn.Module, nn.Module]] = []
        self._attributes: list[tuple[str, Table, Table, Table, Any]] = []  # the user's, ours, and what they last were

    def of(self, stage: int, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Return the blocks of a stage, those that cannot be the user's own as copies."""
        second = self.ties.placement.homes[stage] != self.rank
        return tuple(self._copied(block) if second or self._holds_others(stage, block) else block for block in blocks)

    def _holds_others(self, stage: int, block: Block) -> bool:
        return any(self.ties.home(place.name, stage) != self.rank for place in places_in(block))

    def _copied(self, block: Block) -> Block:
        made = copy.deepcopy(block.module, self._memo)
        for original, ours in zip(block.module.modules(), made.modules(), strict=True):
            self._modules.append((original, ours))
            if not isinstance(original, Piece):  # which is not the user's
                space, copied = vars(original), vars(ours)
                copied.update({kind: space[kind] for kind in HOOKS if kind in space})  # hooks come and go for both
                self._attributes.append((block.name, space, copied, _plain(space), _changing(space)))
            for theirs, own in ((original._parameters, ours._parameters), (original._buffers, ours._buffers)):
                common = frozenset(key for key, tensor in theirs.items() if tensor is own[key])
                self._tables.append((block.name, theirs, own, common))
        return replace(block, module=made)

    @torch.no_grad()
    def follow(self) -> None:
        """Let the copies be what the user's modules are now: their values, what is frozen, the mode, the hooks."""
        for original, ours in self._modules:
            ours.training = original.training
        for at in range(len(self._attributes)):
            self._follow_attributes(at)
        self._follow_tensors()

    def _follow_attributes(self, at: int) -> None:
        block, theirs, own, plain, changing = self._attributes[at]
        now = _plain(theirs)
        if fingerprint(now) != fingerprint(plain):
            for key in plain.keys() - now.keys():
                own.pop(key, None)
            own.update((key, one) for key, one in now.items() if key not in plain or plain[key] is not one)
            self._attributes[at] = (block, theirs, own, now, changing)
        if changing and _changing(theirs) != changing:
            raise ModelError(
                f"a list, dict or set that is an attribute of block {block!r} has changed since the pipeline was made",
                expected="the same content, where ranks of one process hold copies of a block",
                fix="make a new pipeline",
            )

    def _follow_tensors(self) -> None:
        done: set[int] = set()
        for block, theirs, own, common in self._tables:
            if theirs.keys() != own.keys():
                raise ModelError(
                    f"block {block!r} has other parameters or buffers than when the pipeline was made",
                    expected="the same, where ranks of one process hold copies of a block",
                    fix="make a new pipeline",
                )
            for key, tensor in theirs.items():
                if key in common:
                    own[key] = tensor
                elif tensor is not None and id(own[key]) not in done:
                    done.add(id(own[key]))
                    _follow(own[key], tensor)


def _plain(attributes: Table) -> Table:
    return {key: one for key, one in attributes.items() if type(one) in PLAIN}


def _changing(attributes: Table) -> list[Any]:
    kinds = (list, dict, set)
    return [fingerprint(one) for key, one in attributes.items() if type(one) in kinds and key not in _OWN]


def _follow(copied: Tensor, original: Tensor) -> None:
    """Give a copy the original's values, whether it trains, and its hooks."""
    if (copied.shape, copied.dtype, copied.device) == (original.shape, original.dtype, original.device):
        copied.copy_(original)
    else:
        copied.data = original.detach().clone()
    if copied.requires_grad is not original.requires_grad:
        copied.requires_grad_(original.requires_grad)
    if copied._backward_hooks is not original._backward_hooks:
        copied._backward_hooks = original._backward_hooks
