"""Which blocks of a model to measure, if each kind is measured once: a shorter chain of the model's own blocks.

    embed  L0  L1  L2  L3  ...  L38  L39  head          all blocks
    embed  L0  L1  L2           ...       L39  head     those that are measured; L3 to L38 have the numbers of L2

Blocks are of one kind if they are alike (`likeness.py`) and get values alike: of the same shapes and strides, with the
same gradients wanted, from the same distance. The first two of a kind are measured: the first may keep what all share,
such as a mask. Others are neither run nor given memory. The first and the last block are always measured.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.blocks.script import Code, Live
from drumline.model.randomness import Randomness
from drumline.model.values import pack
from drumline.plan.device.blocks import Profile
from drumline.profile.blocks import left_as_it_was, static_bytes
from drumline.profile.chain import Chain
from drumline.profile.likeness import Watched, likenesses
from drumline.profile.working import Working
from drumline.runtime.stage import Partly
from drumline.runtime.stash import Scale

Before = Callable[[Block, int], object]
_MEASURED = 2  # of each kind
_MICROBATCH = 0


@dataclass(frozen=True)
class Kinds:
    """The blocks of a model, those that are measured, and which of these stands for each block.

    `held_bytes` is what one microbatch keeps in those that are measured, without the loss.
    """

    blocks: tuple[Block, ...]
    measured: tuple[Block, ...]
    stands: tuple[int, ...]
    held_bytes: int = 0

    @staticmethod
    def each(blocks: Sequence[Block]) -> Kinds:
        """Return every block as a kind of its own."""
        return Kinds(tuple(blocks), tuple(blocks), tuple(range(len(blocks))))

    def profile(self, measured: Profile) -> Profile:
        """Return the profile of all blocks from that of the measured ones."""
        layers = []
        for block, at in zip(self.blocks, self.stands, strict=True):
            weight_bytes, gradient_bytes = static_bytes(block.module)
            static: dict[str, Any] = {
                "name": block.name,
                "weight_bytes": weight_bytes,
                "gradient_bytes": gradient_bytes,
            }
            layers.append(replace(measured.layers[at], **static))
        return replace(measured, layers=tuple(layers))

    def working(self, measured: Sequence[Working]) -> list[Working]:
        """Return what every block needs while it runs."""
        return [measured[at] for at in self.stands]

    def by_name(self, measured: dict[str, int]) -> dict[str, int]:
        """Return what is known of measured blocks by name for all."""
        names = [block.name for block in self.measured]
        each = ((block.name, names[at]) for block, at in zip(self.blocks, self.stands, strict=True))
        return {name: measured[other] for name, other in each if other in measured}


def kinds_of(
    blocks: Sequence[Block],
    microbatch: Any,
    device: torch.device,
    *,
    seed: int = 0,
    before: Before = lambda block, held_bytes: None,
) -> Kinds:
    """Find the kinds by running one microbatch through blocks that may be measured, one at a time.

    `before` is called with each before it runs, and with the bytes that those before it keep of a microbatch.

    >>> from torch import nn
    >>> model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(9)), nn.Linear(2, 1))
    >>> blocks = [Block(name, layer) for name, layer in model.named_children()]
    >>> kinds_of(blocks, torch.ones(1, 2), torch.device("cpu")).stands
    (0, 1, 2, 2, 2, 2, 2, 2, 2, 3)
    """
    randomness = Randomness(seed, device)
    with left_as_it_was(blocks, randomness):
        return _KindSearch(blocks, randomness, before).kinds(microbatch)


class _KindSearch:
    """Goes through the blocks; `self.value` is what the last one that ran returned."""

    def __init__(self, blocks: Sequence[Block], randomness: Randomness, before: Before) -> None:
        self.blocks, self.before = list(blocks), before
        self.stages = Chain([[block] for block in blocks], randomness, None, split=False).stages
        self.value: Any = None
        self.ran: list[int] = []  # the blocks that are measured
        self.measured: list[Block] = []
        self.held_bytes = 0
        self.codes: list[Code] = []
        self.numbers: list[Sequence[int]] = []  # of the graph's values that come into each traced block

    def kinds(self, microbatch: Any) -> Kinds:
        last = len(self.blocks) - 1
        self.value = microbatch
        self._run(0)
        self._read_codes()
        alike = likenesses(self.blocks, self.codes)
        by_key: dict[Hashable, list[int]] = defaultdict(list)
        after: dict[int, Hashable] = {0: _look(self.value, self._numbers(1))}  # what each block returns
        stands, skipped, reads = {0: 0}, dict[int, Hashable](), set[Hashable]()
        comes = (after[0], self._roles(1))
        for at in range(1, last + 1):
            stage = self.stages[at]
            key = (alike[at].key, comes, stage.trained_below, stage.kind)
            if at < last and len(by_key[key]) >= _MEASURED and alike[at].key not in reads:
                stands[at] = by_key[key][-1]
                skipped[at] = comes
            else:
                for other in (*self._wanted(skipped, comes), at):
                    watched = Watched(alike[other].places)
                    with watched.watching():
                        self._run(other)
                    if watched.is_read:
                        reads.add(alike[other].key)
                    stands[other] = other
                    if other < last:
                        after[other] = _look(self.value, self._numbers(other + 1))
                skipped.clear()
                if len(by_key[key]) < _MEASURED:
                    by_key[key].append(at)
            if at < last:
                comes = (after[stands[at]], self._roles(at + 1))
        places = {block: place for place, block in enumerate(self.ran)}
        chosen = tuple(places[stands[at]] for at in range(len(self.blocks)))
        return Kinds(tuple(self.blocks), tuple(self.measured), chosen, self.held_bytes)

    def _wanted(self, skipped: dict[int, Hashable], comes: Hashable) -> list[int]:
        """Return which of the skipped blocks must run after all, because the next one gets something else."""
        here = (_look(self.value, self._numbers(self.ran[-1] + 1)), self._roles(self.ran[-1] + 1))
        if here == comes or not skipped:
            return []
        first = max(at for at, expected in skipped.items() if expected == here)
        return [at for at in skipped if at >= first]

    def _run(self, at: int) -> None:
        """Run a block, and add it to those that are measured."""
        block = self.blocks[at]
        if self.ran and at > self.ran[-1] + 1:
            block = self._joined(at, self.ran[-1])
        self.ran.append(at)
        self.measured.append(block)
        self.before(block, self.held_bytes)
        if isinstance(block.module, _Joined):
            plain, value = self.value if isinstance(self.value, Partly) else ((), self.value)
            order = block.module.orders[value.sealed]
            value = block.module.ordered(value)
            plain = tuple(place for place, other in enumerate(order) if other in plain)
            self.value = Partly(plain, value) if plain else value
        stage = self.stages[at]
        scale = Scale([stage])
        with scale.watching():
            self.value = stage.forward(_MICROBATCH, self.value)
        value = self.value.value if isinstance(self.value, Partly) else self.value
        self.held_bytes += sum(scale.kept_bytes().values()) + sum(tensor.nbytes for tensor in pack(value)[0])
        stage.begin()

    def _joined(self, at: int, before: int) -> Block:
        """Return a block that takes what an earlier one than its neighbour returns."""
        block = self.blocks[at]
        if not isinstance(block.module, Piece):
            return block
        left, right = self.codes[before + 1], self.codes[at]
        orders = {False: _order(left.takes, right.takes), True: _order(left.resumes, right.resumes)}
        return replace(block, module=_Joined.of(block.module, orders))

    def _read_codes(self) -> None:
        """Keep the code of traced blocks for this microbatch."""
        value = self.value.value if isinstance(self.value, Partly) else self.value
        first = self.blocks[0].module
        if isinstance(value, Live) and isinstance(first, Piece):
            self.codes = first.script.codes(value.kind)
            self.numbers = [code.resumes for code in self.codes]

    def _numbers(self, at: int) -> Sequence[int]:
        return self.numbers[at] if self.numbers else ()

    def _roles(self, at: int) -> Hashable:
        """Return where each value that comes into a traced block is from: from the block before, or from which one."""
        if not self.codes:
            return ()
        passed = {*self.codes[at - 1].takes, *self.codes[at - 1].resumes}
        return tuple(
            tuple(number if number in passed else -1 for number in sorted(numbers))
            for numbers in (self.codes[at].takes, self.codes[at].resumes)
        )


class _Joined(Piece):
    """A traced block behind another than its neighbour: the same values come to it in another order."""

    orders: dict[bool, tuple[int, ...]]

    @staticmethod
    def of(piece: Piece, orders: dict[bool, tuple[int, ...]]) -> _Joined:
        joined = copy.copy(piece)
        joined.__class__ = _Joined
        assert isinstance(joined, _Joined)
        joined.orders = orders
        return joined

    def ordered(self, value: Live) -> Live:
        """Return a value in the order of this block."""
        return value._replace(tensors=tuple(value.tensors[at] for at in self.orders[value.sealed]))

    def forward(self, value: Any, compiled: Any = None) -> Any:
        """Run the block."""
        return super().forward(self.ordered(value), compiled)

    __call__ = forward


def _order(numbers: Sequence[int], wanted: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each wanted value among those given, both counted in the order of their numbers.

    >>> _order([7, 2, 5], [12, 19, 15])
    (1, 0, 2)
    """
    sorted_places = sorted(range(len(numbers)), key=numbers.__getitem__)
    ranks = {number: rank for rank, number in enumerate(sorted(wanted))}
    return tuple(sorted_places[ranks[number]] for number in wanted)


def _look(value: Any, numbers: Sequence[int]) -> Hashable:
    """Return what the kind of the next block depends on: its tensors' forms, in the order of their numbers."""
    plain, value = value if isinstance(value, Partly) else ((), value)
    tensors, form = (value.tensors, None) if isinstance(value, Live) else pack(value)
    order = sorted(range(len(tensors)), key=numbers.__getitem__) if numbers else range(len(tensors))
    storages: dict[int, int] = {}
    looks = []
    for at in order:
        tensor = tensors[at]
        storage = tensor.untyped_storage()
        same = storages.setdefault(storage.data_ptr(), len(storages))
        looks.append((tensor.shape, tensor.stride(), tensor.dtype, storage.nbytes(), same, at in plain))
    return repr(form), tuple(looks)
