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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.catalogue import places_in
from drumline.model.follow.skeleton import copied
from drumline.model.hooks import HOOKS
from drumline.model.watch.fingerprint import fingerprint, plain_in
from drumline.model.weights.tied import containers_in


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

    >>> one = nn.Parameter(torch.ones(3)); give_up(one); one.untyped_storage().nbytes()
    4
    """
    tensor.data = without_memory(tensor.shape, tensor.dtype, tensor.device)
    tensor.grad = None


def _stand_in(tensor: Tensor, device: torch.device) -> Tensor:
    made = without_memory(tensor.shape, tensor.dtype, device)
    if isinstance(tensor, nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    for kind in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if (hooks := getattr(tensor, kind, None)) is not None:
            setattr(made, kind, hooks)
    return made


class _Seen(NamedTuple):
    """The user's module when its copy last followed: plain attributes with its mode, and what else may change."""

    plain: dict[str, Any]
    containers: list[Any]
    trains: list[bool]

    @staticmethod
    def of(module: nn.Module) -> _Seen:
        space = vars(module)
        return _Seen(plain_in(space), containers_in(space), [one.requires_grad for one in _parameters(module)])


def _parameters(module: nn.Module) -> list[nn.Parameter]:
    return [one for one in module._parameters.values() if one is not None]


@dataclass(slots=True)
class _Pair:
    """A module of the user's, its copy here, and the user's when the copy began to be used or last followed."""

    theirs: ref[nn.Module]
    ours: nn.Module
    seen: _Seen | None = None

    def begin(self) -> None:
        original = self.theirs()
        self.seen = None if original is None else _Seen.of(original)

    def follow(self, block: str) -> None:
        original, before = self.theirs(), self.seen
        if original is None or before is None:
            return
        now = _Seen.of(original)
        if now.containers != before.containers:
            raise ModelError(
                f"a list, dict or set in an attribute of block {block!r} has changed since the block moved here",
                expected="unchanged contents: this rank runs a copy of the block",
                fix="change it before the move, or create a new pipeline",
            )
        if fingerprint(now.plain) != fingerprint(before.plain):
            own, old = vars(self.ours), before.plain
            own.update((key, one) for key, one in now.plain.items() if key not in old or old[key] is not one)
            for key in before.plain.keys() - now.plain.keys():
                own.pop(key, None)
        if now.trains != before.trains:
            for one, flag in zip(_parameters(self.ours), now.trains, strict=True):
                one.requires_grad_(flag)
        self.seen = now


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
        self, blocks: Mapping[int, Block], own: Mapping[str, Tensor], first: Callable[[str], str], device: torch.device
    ) -> None:
        self._made: dict[int, Block] = {}
        self._problems: dict[int, ModelError] = {}
        self.copies: dict[int, list[_Pair]] = {}  # of modules that have come here, with the user's, by block
        modules = [module for block in blocks.values() for module in block.module.modules()]
        memo: dict[int, Any] = {
            id(one): one for each in modules for one in vars(each).values() if isinstance(one, Tensor)
        }
        known = dict(own)
        for place in (place for block in blocks.values() for place in places_in(block)):
            name = first(place.name)
            assert place.tensor is not None
            if name not in known:
                known[name] = _stand_in(place.tensor, device)
            memo[id(place.tensor)] = known[name]
        for number, block in blocks.items():
            self._copy(number, block, memo)

    def _copy(self, number: int, block: Block, memo: dict[int, Any]) -> None:
        try:
            made = copied(block.module, memo)
        except Exception as error:  # of the user's own classes
            self._problems[number] = ModelError(
                f"block {block.name!r} cannot move: {type(error).__name__}: {error}",
                expected="a block that copy.deepcopy can copy",
            )
            return
        pairs = self.copies[number] = []
        for original, ours in zip(block.module.modules(), made.modules(), strict=True):
            if isinstance(ours, Piece):
                ours.join()
            else:
                space = vars(original)
                vars(ours).update({kind: space[kind] for kind in HOOKS if kind in space})  # both share their hooks
                pairs.append(_Pair(ref(original), ours))
        self._made[number] = replace(block, module=made)

    def block(self, number: int) -> Block:
        """Return the copy of a block; raise if it could not be made."""
        if number in self._problems:
            raise self._problems[number]
        return self._made[number]

    def arrived(self, number: int) -> None:
        """Begin to follow the user's block from its current state."""
        for pair in self.copies.get(number, ()):
            pair.begin()

    def follow(self, numbers: Iterable[int]) -> None:
        """Let the copies of these blocks follow the user's modes and plain attributes, and what the user freezes."""
        for number in numbers:
            for pair in self.copies.get(number, ()):
                pair.follow(self._made[number].name)
