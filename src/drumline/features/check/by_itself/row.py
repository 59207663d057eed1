"""A list of blocks of which each rank has some, run by itself: each rank runs its own, and passes on what they make.

    rank 0   blocks 0 to 3 ──► (received)    ──► loss
    rank 1   (received)    ──► blocks 4 to 7 ──► loss

Nothing lies between the blocks of a list, so ranks exchange only where the next block is elsewhere. No rank needs the
user's model for it, nor memory for others' blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from drumline.engine.unsplit.plain import Plain, through
from drumline.features.check.by_itself.remote_model import Relay
from drumline.model.block import Block
from drumline.model.randomness import Randomness


class BlockRow(Plain):
    """The blocks in order, each with the ranks that have it; `here` are those of this process."""

    def __init__(self, relay: Relay, order: Sequence[tuple[str, frozenset[int]]], here: Sequence[Block]) -> None:
        self._here = {block.name: block for block in here}
        super().__init__({name: block.module for name, block in self._here.items()}, list(self._here))
        self._relay = relay
        self._groups = [[name for name, _ in each] for _, each in groupby(order, key=lambda pair: pair[1])]

    def run(self, value: Any, microbatch: int, randomness: Randomness, drawing: Collection[str]) -> Any:
        """Run all blocks, each where it is."""
        for names in self._groups:
            title = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            blocks = [self._here[name] for name in names if name in self._here]
            run = partial(through, blocks, microbatch=microbatch, randomness=randomness, drawing=drawing)
            value = self._relay.call(title, run, (value,), {}, is_here=bool(blocks))
        return value
