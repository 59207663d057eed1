"""Fewer microbatches than a recipe was made for.

No action needs one of another microbatch, so leaving some microbatches out of a legal program leaves a legal program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drumline.core.action import Action


def trim(row: Iterable[Action], num_microbatches: int) -> Iterator[Action]:
    """Yield the actions on microbatches 0 to num_microbatches - 1; an overlapped pair that loses one half is the other.

    >>> row = [Action.parse(text) for text in ("0F0", "(0F1;1B0)OVERLAP_F_B", "1B1")]
    >>> list(trim(row, 1))
    [0F0, 1B0]
    """
    for action in row:
        if action.parts:
            first, second = action.parts
            if first.microbatch < num_microbatches and second.microbatch < num_microbatches:
                yield action
            else:
                yield from trim(action.parts, num_microbatches)
        elif (action.microbatch or 0) < num_microbatches:
            yield action
