"""Fewer microbatches than a recipe was made for.

No action needs one of another microbatch, so leaving some microbatches out of a legal program leaves a legal program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from drumline.core.action import Action


def trim(row: Iterable[Action], keep: Callable[[Action], bool]) -> Iterator[Action]:
    """Yield the actions to keep; an overlapped pair that loses one half becomes the other.

    >>> row = [Action.parse(text) for text in ("0F0", "(0F1;1B0)OVERLAP_F_B", "1B1")]
    >>> list(trim(row, lambda action: action.microbatch == 0))
    [0F0, 1B0]
    """
    for action in row:
        if not action.parts:
            if keep(action):
                yield action
            continue
        kept = [part for part in action.parts if keep(part)]
        if len(kept) == len(action.parts):
            yield action
        else:
            yield from kept


def below(num_microbatches: int) -> Callable[[Action], bool]:
    """Return the test that keeps microbatches 0 to num_microbatches - 1.

    >>> below(2)(Action.parse("0F2"))
    False
    """
    return lambda action: action.microbatch is None or action.microbatch < num_microbatches
