"""Numbers on a page: columns of numbers as text for JSON, and times from the timeline's start.

Packed columns take a third of the size, and a tenth of the time, of decimal numbers:

    u1:AAEC    the numbers 0, 1, 2: their type, and the base64 of their bytes

A type is numpy's: unsigned or signed integers of 1, 2 or 4 bytes, or floats of 8; the lowest byte comes first.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.core.graph import Floats, Ints
from drumline.core.timeline.timeline import Timeline

Times = Sequence[float] | Floats
# Decimals to try before using all digits: costs mostly have few.
_FEW_DECIMALS = 4
_WHOLE = {kind: np.iinfo(kind) for kind in ("u1", "i2", "i4")}


def packed(numbers: Sequence[float] | npt.NDArray[Any]) -> str:
    """Return numbers as text, in the smallest type that holds them exactly.

    >>> packed([0, 1, 2]), packed([0.5])
    ('u1:AAEC', 'f8:AAAAAAAA4D8=')
    """
    column = np.asarray(numbers)
    kind = _kind(column)
    return f"{kind}:{b64encode(column.astype(f'<{kind}').tobytes()).decode()}"


def _kind(column: npt.NDArray[Any]) -> str:
    if column.dtype.kind == "f" and not np.array_equal(column, np.floor(column)):
        return "f8"
    low, high = column.min(initial=0), column.max(initial=0)
    return next((kind for kind, range_ in _WHOLE.items() if range_.min <= low and high <= range_.max), "f8")


class PageTime(NamedTuple):
    """Converts times to numbers: decimals to a billionth of the makespan, or whole ticks for boxes, which are exact."""

    origin: float
    digits: int
    ticks_per_second: int

    @staticmethod
    def of(timeline: Timeline) -> PageTime:
        """Return a clock whose ticks include all starts and ends of actions."""
        makespan, origin = timeline.makespan, timeline.start
        digits = 9 - math.floor(math.log10(makespan)) if makespan > 0 else 9
        times = [times for track in timeline.tracks for times in (track.starts, track.ends)]
        rounded = np.round(np.concatenate(times) - origin if times else np.empty(0), digits)
        needed = (few for few in range(_FEW_DECIMALS) if np.array_equal(np.round(rounded, few), rounded))
        return PageTime(origin, digits, 10 ** max(0, min(next(needed, digits), digits)))

    def ticks(self, times: Times) -> Ints:
        """Return starts or ends of actions, in ticks from the timeline's start."""
        since = np.round(np.asarray(times, float) - self.origin, self.digits)
        return np.rint(since * self.ticks_per_second).astype(np.int64)

    def times(self, times: Times) -> list[float]:
        """Return times in seconds from the timeline's start."""
        return self.lengths(np.asarray(times, float) - self.origin)

    def lengths(self, seconds: Times) -> list[float]:
        """Return seconds unchanged."""
        return plain(np.round(np.asarray(seconds, float), self.digits))

    def steps(self, times: Times, values: Times) -> dict[str, str]:
        """Return a step curve over starts and ends, without repeated times (the last counts) or steps of no height."""
        at, value = self.ticks(times), np.asarray(values, float)
        last = np.append(at[1:] != at[:-1], True)
        at, value = at[last], value[last]
        changes = np.append(True, value[1:] != value[:-1])
        return {"time": packed(at[changes]), "value": packed(value[changes])}


def plain(values: Floats) -> list[float]:
    """Return plain numbers, without a decimal point if all are whole.

    >>> plain(np.array([1.0, 2.0])), plain(np.array([1.0, 2.5]))
    ([1, 2], [1.0, 2.5])
    """
    whole = bool((values == np.floor(values)).all()) and float(np.abs(values).max(initial=0.0)) < 2**53
    numbers: list[float] = (values.astype(np.int64) if whole else values).tolist()
    return numbers
