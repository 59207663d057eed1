"""What slices of a sequence take: later ones attend to more keys, so lengths that take the same time fall."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from drumline.core.costs import slice_shares


def shares(lengths: Sequence[int], attention: float) -> tuple[float, ...]:
    """Return each slice's share of the seconds of its sequence, of which attention takes the part `attention`.

    >>> [round(share, 3) for share in shares([4, 4], attention=0.0)]
    [0.5, 0.5]
    >>> [round(share, 3) for share in shares([512] * 4, attention=0.4)]
    [0.175, 0.225, 0.275, 0.325]
    """
    return slice_shares(lengths, attention)


def even_shares(length: int, num_slices: int, attention: float, *, multiple: int = 1) -> tuple[int, ...]:
    """Return the lengths of slices that take the same time, as far as multiples of so many tokens allow.

    The k-th slice ends where the time from the beginning, (1-a)x + ax² for the part x of a sequence, is k/S of all.

    >>> even_shares(2048, 4, attention=0.4)
    (696, 525, 440, 387)
    >>> [round(share, 3) for share in shares(even_shares(2048, 4, attention=0.4), attention=0.4)]
    [0.25, 0.25, 0.25, 0.25]
    """
    ends = [0]
    for number in range(1, num_slices + 1):
        part = number / num_slices
        if attention > 0:
            rest = 1.0 - attention
            part = (-rest + (rest * rest + 4.0 * attention * part) ** 0.5) / (2.0 * attention)
        ends.append(round(part * length / multiple) * multiple)
    ends[-1] = length
    return tuple(end - start for start, end in pairwise(ends))
