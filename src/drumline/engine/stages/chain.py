"""All blocks of a model in order: those of this process, and copies without memory of those that others hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.engine.stages.assembly import LossHolder
from drumline.model.block import Block
from drumline.model.catalogue import places_in
from drumline.model.weights.remote_blocks import Absent


class Chain:
    """The blocks, by number, and how many of them each stage has. `held` are the stages of this process."""

    def __init__(
        self,
        cuts: Sequence[Sequence[Block]],
        held_stages: Collection[int],
        first: Callable[[str], str],
        device: torch.device,
    ) -> None:
        blocks = [block for stage in cuts for block in stage]
        self.names = [block.name for block in blocks]
        self.counts = tuple(len(stage) for stage in cuts)
        self.has_loss = isinstance(blocks[-1].module, LossHolder)  # as a block behind the model's own
        self._first = first
        self._held_numbers = set(self.numbers(self.counts, held_stages))
        self._blocks = {number: blocks[number] for number in self._held_numbers}  # that are or were here
        own_tensors = self.tensors(self._held_numbers)
        others = {number: block for number, block in enumerate(blocks) if number not in self._held_numbers}
        self.absent = Absent(others, own_tensors, first, device)

    def balance(self, counts: Sequence[int] | None = None) -> tuple[int, ...]:
        """Return how many of the model's own blocks each stage has."""
        *others, last = self.counts if counts is None else counts
        return (*others, last - self.has_loss)

    @property
    def stages(self) -> list[list[str]]:
        """The names of the model's own blocks in each stage."""
        spans = pairwise(accumulate(self.balance(), initial=0))
        return [self.names[first:last] for first, last in spans]

    @staticmethod
    def numbers(counts: Sequence[int], stages: Iterable[int]) -> list[int]:
        """Return the numbers of the blocks in some stages, if stages have so many blocks.

        >>> Chain.numbers([2, 3, 1], [0, 2])
        [0, 1, 5]
        """
        spans = list(pairwise(accumulate(counts, initial=0)))
        return [number for stage in sorted(stages) for number in range(*spans[stage])]

    def cuts_of(self, counts: Sequence[int]) -> tuple[str, ...]:
        """Return the names of the first blocks of stages 1, 2, ..."""
        return tuple(self.names[start] for start in list(accumulate(counts))[:-1])

    def block(self, number: int) -> Block:
        """Return a block, or its copy without memory."""
        block = self._blocks.get(number)
        return self.absent.block(number) if block is None else block

    def shown(self) -> list[Block]:
        """Return the model's own blocks, to be cut; what cannot be copied has no insides."""
        blocks = []
        for number, name in enumerate(self.names[: len(self.names) - self.has_loss]):
            try:
                blocks.append(self.block(number))
            except ModelError:  # which is raised again if this very block has to come here
                blocks.append(Block(name, nn.Identity()))
        return blocks

    def tensors(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """Return the tensors of some blocks by their first names."""
        places = (place for number in numbers for place in places_in(self.block(number)))
        return {self._first(place.name): place.tensor for place in places if place.tensor is not None}

    def cut(self, counts: Sequence[int], held_stages: Collection[int]) -> list[tuple[Block, ...]]:
        """Give each stage so many blocks; return those of the stages that are held here, and none of others."""
        self.counts = tuple(counts)
        now = set(self.numbers(counts, held_stages))
        for number in sorted(now - self._held_numbers):
            self._blocks[number] = self.block(number)
            self.absent.arrived(number)
        self._held_numbers = now
        spans = pairwise(accumulate(counts, initial=0))
        return [
            tuple(self._blocks[number] for number in range(*span)) if stage in held_stages else ()
            for stage, span in enumerate(spans)
        ]

    def follow(self) -> None:
        """Let copies that are in use follow the user's model, while it lives."""
        self.absent.follow(self._held_numbers)
