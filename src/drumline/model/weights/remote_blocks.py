"""Blocks that other ranks hold, without their memory: with them, a rank can take a block over while it runs.

    block 3, here         its tensors have memory
    block 4, elsewhere    the same code and structure; each tensor has its shape, and one element for all places

A tensor stays the same object whether its block is here or elsewhere: only its memory comes and goes. So hooks, tied
tensors and whatever refers to a parameter stay as they are. Copies of blocks that were never here are made once, when
the pipeline is, because the user may then let go of the model. While the model lives, copies that are in use follow its
modes, its plain attributes, and what is frozen in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.catalogue import places_in
from drumline.model.follow.skeleton import copied
from drumline.model.quantised.packed import copied_states, is_packed, mapped_parts, parts_of, put_parts, settle
from drumline.model.weights.twin import Twin


def without_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of a shape with memory for one element; not a number where there is such a value.

    >>> without_memory((2, 2), torch.float32, torch.device("cpu"))
    tensor([[nan, nan],
            [nan, nan]])
    """
    fill = math.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), fill, dtype=dtype, device=device).expand(tuple(shape))


def give_up(tensor: Tensor) -> None:
    """Free a tensor's memory; the object stays.

    >>> value = nn.Parameter(torch.ones(3)); give_up(value); value.untyped_storage().nbytes()
    4
    """
    if is_packed(tensor):
        put_parts(tensor, {name: _empty(part) for name, part in parts_of(tensor).items()})
        return
    tensor.data = _empty(tensor)
    tensor.grad = None


def _empty(tensor: Tensor) -> Tensor:
    return without_memory(tensor.shape, tensor.dtype, tensor.device)


def stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor like another, with its hooks and attributes, and without its memory."""
    if is_packed(tensor):
        return mapped_parts(tensor, lambda part: without_memory(part.shape, part.dtype, device))
    stand = without_memory(tensor.shape, tensor.dtype, device)
    if isinstance(tensor, nn.Parameter):
        stand = torch.Tensor._make_subclass(type(tensor), stand, tensor.requires_grad)
    stand.__dict__.update(tensor.__dict__)
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, kind, None)) is not None:
            setattr(stand, kind, hooks)
    return stand


class Absent:
    """Copies of the blocks that this process does not hold, by number, without memory.

    `own` are the tensors here by their first name, which `first` returns for any name: a copy has the tensor itself
    where it is tied to one.

    >>> absent = Absent({4: Block("4", nn.Linear(2, 2))}, {}, str, torch.device("cpu"))
    >>> weight = absent.block(4).module.weight
    >>> weight.shape, weight.untyped_storage().nbytes()
    (torch.Size([2, 2]), 4)
    """

    def __init__(
        self,
        blocks: Mapping[int, Block],
        own_tensors: Mapping[str, Tensor],
        first: Callable[[str], str],
        device: torch.device,
    ) -> None:
        self._new_blocks: dict[int, Block] = {}
        self._problems: dict[int, ModelError] = {}
        self.copies: dict[int, list[Twin]] = {}  # of modules that have come here, with the user's, by block
        modules = [module for block in blocks.values() for module in block.module.modules()]
        settle(modules)
        memo: dict[int, Any] = {
            id(tensor): tensor for each in modules for tensor in vars(each).values() if isinstance(tensor, Tensor)
        }
        known = dict(own_tensors)
        for place in (place for block in blocks.values() for place in places_in(block)):
            name = first(place.name)
            assert place.tensor is not None
            if name not in known:
                known[name] = stand_in(place.tensor, device)
            memo[id(place.tensor)] = known[name]
            memo |= copied_states(place.tensor, known[name])
        for number, block in blocks.items():
            self._copy(number, block, memo)

    def _copy(self, number: int, block: Block, memo: dict[int, Any]) -> None:
        try:
            module = copied(block.module, memo)
        except Exception as error:  # of the user's own classes
            self._problems[number] = ModelError(
                f"block {block.name!r} cannot move: {type(error).__name__}: {error}",
                expected="a block that copy.deepcopy can copy",
            )
            return
        settle(module.modules())
        twins = self.copies[number] = []
        for original, ours in zip(block.module.modules(), module.modules(), strict=True):
            if isinstance(ours, Piece):
                ours.join()
            else:
                twins.append(Twin(original, ours))
        self._new_blocks[number] = replace(block, module=module)

    def modules(self) -> dict[nn.Module, nn.Module]:
        """Return the copies of modules, by the user's own."""
        twins = (twin for each in self.copies.values() for twin in each)
        return {original: twin.ours for twin in twins if (original := twin.theirs()) is not None}

    def block(self, number: int) -> Block:
        """Return the copy of a block; raise if it could not be made."""
        if number in self._problems:
            raise self._problems[number]
        return self._new_blocks[number]

    def arrived(self, number: int) -> None:
        """Begin to follow the user's block from its current state."""
        for twin in self.copies.get(number, ()):
            twin.begin()

    def follow(self, numbers: Iterable[int]) -> None:
        """Let the copies of these blocks follow the user's modes and plain attributes, and what the user freezes."""
        for number in numbers:
            for twin in self.copies.get(number, ()):
                twin.follow(self._new_blocks[number].name, since="the block moved here")
