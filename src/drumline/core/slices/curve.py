"""What a slice takes: fixed seconds, seconds for each of its tokens, and seconds for each pair of query and key.

    keys     1 1 1 1 . . . .     slice 0: tokens 0 to 4, 8 pairs       seconds = fixed + tokens x per_token
             1 1 1 1 1 1 1 1     slice 1: tokens 4 to 8, 24 pairs                + pairs x per_pair

A slice from `start` to `end` counts (end² - start²)/2 pairs, so that slices together count those of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drumline.core.costs import slice_shares
from drumline.core.errors import CostsError


@dataclass(frozen=True, slots=True)
class SliceCurve:
    """Seconds of a slice: `fixed` for each, `per_token` of it, and `per_pair` of its queries and keys.

    >>> SliceCurve(fixed=1.0, per_token=0.5, per_pair=0.25).at(4, 8)
    9.0
    """

    fixed: float = 0.0
    per_token: float = 0.0
    per_pair: float = 0.0

    @staticmethod
    def of(seconds: float, tokens: int, *, attention: float = 0.0, overhead: float = 0.0) -> SliceCurve:
        """Return the curve of what takes so many seconds for a whole sequence, of which `attention` is the part `a`.

        Every slice takes as long as `overhead` tokens more.

        >>> curve = SliceCurve.of(1.0, 1024, attention=0.5, overhead=16)
        >>> curve.at(0, 512), curve.at(512, 1024)
        (0.390625, 0.640625)
        """
        check_attention(attention)
        if not 0.0 <= overhead < float("inf"):
            raise CostsError(f"overhead is {overhead:g} tokens", expected="0 or more")
        return SliceCurve(
            seconds * overhead / tokens, (1.0 - attention) * seconds / tokens, 2.0 * attention * seconds / tokens**2
        )

    def at(self, start: int, end: int) -> float:
        """Return the seconds of the slice from one token to before another."""
        return self.fixed + self.per_token * (end - start) + self.per_pair * (end * end - start * start) / 2.0

    def __add__(self, other: SliceCurve) -> SliceCurve:
        """Return the curve of both, one after the other in one slice."""
        return SliceCurve(self.fixed + other.fixed, self.per_token + other.per_token, self.per_pair + other.per_pair)

    def times(self, factor: float) -> SliceCurve:
        """Return the curve of what takes so many times as long.

        >>> SliceCurve(1.0, 2.0, 4.0).times(0.5)
        SliceCurve(fixed=0.5, per_token=1.0, per_pair=2.0)
        """
        return SliceCurve(self.fixed * factor, self.per_token * factor, self.per_pair * factor)


def check_attention(part: float) -> None:
    """Raise an error unless attention takes a part of the time.

    >>> check_attention(1.5)
    Traceback (most recent call last):
    drumline.core.errors.CostsError: attention is 1.5 of the time; expected a part of it, from 0 to 1
    """
    slice_shares([1.0], part)


Point = tuple[int, int, float]  # where a slice begins and ends, and its seconds


def fitted_curve(points: Sequence[Point]) -> SliceCurve:
    """Return the curve nearest to what slices took, with errors relative to their seconds; no part is negative.

    >>> points = [(0, 4, 4.0), (0, 8, 11.0), (4, 8, 8.0), (8, 16, 27.0)]
    >>> curve = fitted_curve(points)
    >>> round(curve.fixed, 6), round(curve.per_token, 6), round(curve.per_pair, 6)
    (1.0, 0.25, 0.25)
    """
    if not points:
        raise CostsError("no slice was measured", expected="the seconds of one or more")
    table = np.array([(1.0, end - start, (end * end - start * start) / 2.0) for start, end, _ in points])
    seconds = np.array([seconds for _, _, seconds in points])
    scale = np.maximum(table.max(axis=0), 1e-300)
    weights = 1.0 / np.maximum(seconds, 1e-12)
    columns, wanted = table / scale * weights[:, None], seconds * weights
    best: tuple[float, list[float]] | None = None
    for chosen in ([0, 1, 2], [0, 1], [1, 2], [0, 2], [0], [1], [2]):  # the least squares whose parts are not negative
        parts, *_ = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)
        if (parts < 0).any():
            continue
        missed = float(((columns[:, chosen] @ parts - wanted) ** 2).sum())
        if best is None or missed < best[0] * (1 - 1e-9) - 1e-18:
            whole = np.zeros(3)
            whole[chosen] = parts
            best = missed, (whole / scale).tolist()
    assert best is not None, "a single part of positive seconds is never negative"
    return SliceCurve(*best[1])
