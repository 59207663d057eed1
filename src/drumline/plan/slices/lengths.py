"""Lengths of slices: those whose longest takes least, exactly, in multiples of so many tokens.

A slice takes longer if it ends later or begins earlier. So the most tokens that stay within some seconds, slice after
slice, reach as far as any lengths can. Bisection finds the least seconds that reach the end.

    seconds too few    |-----|----|---|--|-- end         enough    |------|----|----|---|
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from drumline.core.errors import PlanError
from drumline.core.slices.curve import SliceCurve

_HALVINGS = 60


def equal_lengths(tokens: int, num_slices: int, multiple: int = 1) -> tuple[int, ...]:
    """Return lengths as equal as multiples allow, longer ones first.

    >>> equal_lengths(64, 3, 8)
    (24, 24, 16)
    """
    blocks = num_blocks(tokens, num_slices, multiple)
    each, more = divmod(blocks, num_slices)
    return tuple((each + (number < more)) * multiple for number in range(num_slices))


def num_blocks(tokens: int, num_slices: int, multiple: int) -> int:
    """Return how many multiples a sequence has; refuse what cannot be divided.

    >>> num_blocks(100, 4, 16)
    Traceback (most recent call last):
    drumline.core.errors.PlanError: sequences have 100 tokens; expected a multiple of 16 ...
    """
    if min(tokens, num_slices, multiple) < 1:
        raise PlanError(
            f"{tokens} tokens in {num_slices} slices of multiples of {multiple}", expected="1 or more of each"
        )
    if tokens % multiple:
        raise PlanError(
            f"sequences have {tokens} tokens",
            expected=f"a multiple of {multiple} (lengths of slices are)",
            fix="choose another multiple, or another length of sequences",
        )
    if tokens // multiple < num_slices:
        raise PlanError(
            f"sequences of {tokens} tokens have {tokens // multiple} times {multiple} tokens",
            expected=f"{num_slices} or more, one for each slice",
            fix=f"use {tokens // multiple} slices or fewer",
        )
    return tokens // multiple


def shortest_longest(
    curve: SliceCurve, tokens: int, num_slices: int, multiple: int = 1
) -> tuple[tuple[int, ...], float]:
    """Return lengths whose longest slice takes least, and a time that no lengths stay below.

    >>> lengths, least = shortest_longest(SliceCurve.of(1.0, 64, attention=0.5), 64, 4, 8)
    >>> lengths, round(least, 4)
    ((24, 16, 16, 8), 0.3125)
    """
    blocks = num_blocks(tokens, num_slices, multiple)

    def reached(seconds: float) -> list[int]:
        """Return the ends of slices as long as they may be, each at least one multiple, leaving some for the rest."""
        ends = [0]
        for number in range(num_slices):
            low, high = ends[-1] + 1, blocks - (num_slices - 1 - number)
            if curve.at(ends[-1] * multiple, low * multiple) > seconds:
                return []
            while low < high:
                middle = (low + high + 1) // 2
                if curve.at(ends[-1] * multiple, middle * multiple) <= seconds:
                    low = middle
                else:
                    high = middle - 1
            ends.append(low)
        return ends if ends[-1] == blocks else []

    low, high = 0.0, curve.at(0, tokens)
    best = reached(high)
    if not best:  # even the longest last slice does: one multiple each, and all others at the end
        high, best = curve.at(0, tokens) * 2, reached(curve.at(0, tokens) * 2)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        ends = reached(middle)
        low, high, best = (low, middle, ends) if ends else (middle, high, best)
    return tuple((end - start) * multiple for start, end in pairwise(best)), low


def between(lengths: Sequence[int], others: Sequence[int], part: float, multiple: int) -> tuple[int, ...]:
    """Return lengths whose slices end a part of the way from the ends of these to those of others.

    Later slices of equal time are shorter, so a rank that has some of the first holds more: a limit may want less.

    >>> between((32, 32, 32, 32), (48, 32, 24, 24), 0.5, 8)
    (40, 32, 24, 32)
    """
    ends = [
        round(((1 - part) * end + part * other) / multiple) * multiple
        for end, other in zip(accumulate(lengths), accumulate(others), strict=True)
    ]
    return tuple(end - start for start, end in pairwise([0, *ends]))


def moved_lengths(lengths: Sequence[int], source: int, target: int, tokens: int) -> tuple[int, ...] | None:
    """Return the lengths after tokens moved from one slice to another; None if too few are left.

    >>> moved_lengths((24, 16, 8), 0, 2, 8), moved_lengths((24, 16, 8), 2, 0, 8)
    ((16, 16, 16), None)
    """
    if lengths[source] <= tokens or source == target:
        return None
    result = list(lengths)
    result[source] -= tokens
    result[target] += tokens
    return tuple(result)
