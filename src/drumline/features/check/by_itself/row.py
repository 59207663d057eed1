"""A list of blocks of which each rank has some, run by itself: each rank runs its own, and passes on what they make.

    rank 0   blocks 0 to 3 ──► (received)    ──► loss
    rank 1   (received)    ──► blocks 4 to 7 ──► loss

Nothing lies between the blocks of a list, so ranks exchange only where the next block is elsewhere. No rank needs the
user's model for it, nor memory for others' blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

from torch import nn

from drumline.features.check.by_itself.relay import Relay
from drumline.model.randomness import Randomness, may_draw


class Row:
    """The blocks in order, each with the ranks that have it; `here` are those of this process."""

    def __init__(
        self, relay: Relay, order: Sequence[tuple[str, frozenset[int]]], here: Mapping[str, nn.Module]
    ) -> None:
        self._relay, self._here = relay, here
        self._groups = [[name for name, _ in each] for _, each in groupby(order, key=lambda pair: pair[1])]

    @property
    def modules(self) -> list[nn.Module]:
        """All modules in this process."""
        return list(dict.fromkeys(one for block in self._here.values() for one in block.modules()))

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return their parameters by all of their names."""
        each = (one.named_parameters(prefix=name, remove_duplicate=False) for name, one in self._here.items())
        return {name: one for named in each for name, one in named}

    @contextmanager
    def seeding(self, microbatch: int, randomness: Randomness) -> Iterator[Callable[[Any], Any]]:
        """Yield a function that runs all blocks on a microbatch, each seeded if it may draw."""
        drawing = {name for name, block in self._here.items() if may_draw(block)}

        def through(names: Sequence[str], value: Any) -> Any:
            for name in names:
                if name in drawing:
                    randomness.apply(microbatch, name)
                value = self._here[name](value)
            return value

        def run(value: Any) -> Any:
            for names in self._groups:
                called = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
                is_here = names[0] in self._here
                value = self._relay.call(called, partial(through, names), (value,), {}, is_here=is_here)
            return value

        yield run
