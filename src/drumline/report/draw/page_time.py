"""Times as numbers on a page: from the timeline's start, to a billionth of its makespan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from drumline.core.simulate.graph import Floats, Ints
from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.packed import packed

Times = Sequence[float] | Floats

# Decimals that are tried before all that count: costs are mostly given with few.
_FEW_DECIMALS = 4


class Clock(NamedTuple):
    """How times become numbers: decimals, or whole ticks for starts and ends of boxes, which are exact."""

    origin: float
    digits: int
    ticks_per_second: int

    @staticmethod
    def of(timeline: Timeline) -> Clock:
        """Return the clock whose ticks all starts and ends of actions fall on."""
        makespan, origin = timeline.makespan, timeline.start
        digits = 9 - math.floor(math.log10(makespan)) if makespan > 0 else 9
        times = [times for track in timeline.tracks for times in (track.starts, track.ends)]
        rounded = np.round(np.concatenate(times) - origin if times else np.empty(0), digits)
        needed = (few for few in range(_FEW_DECIMALS) if np.array_equal(np.round(rounded, few), rounded))
        return Clock(origin, digits, 10 ** max(0, min(next(needed, digits), digits)))

    def ticks(self, times: Times) -> Ints:
        """Return starts or ends of actions, in ticks from the timeline's start."""
        since = np.round(np.asarray(times, float) - self.origin, self.digits)
        return np.rint(since * self.ticks_per_second).astype(np.int64)

    def times(self, times: Times) -> list[float]:
        """Return any times, in seconds from the timeline's start."""
        return self.lengths(np.asarray(times, float) - self.origin)

    def lengths(self, seconds: Times) -> list[float]:
        """Return seconds as they are."""
        return plain(np.round(np.asarray(seconds, float), self.digits))

    def steps(self, times: Times, values: Times) -> dict[str, str]:
        """Return a step curve over starts and ends, without repeated times (the last counts) or steps of no height."""
        at, value = self.ticks(times), np.asarray(values, float)
        last = np.append(at[1:] != at[:-1], True)
        at, value = at[last], value[last]
        changes = np.append(True, value[1:] != value[:-1])
        return {"time": packed(at[changes]), "value": packed(value[changes])}


def plain(values: Floats) -> list[float]:
    """Return plain numbers, without a point where all are whole.

    >>> plain(np.array([1.0, 2.0])), plain(np.array([1.0, 2.5]))
    ([1, 2], [1.0, 2.5])
    """
    whole = bool((values == np.floor(values)).all()) and float(np.abs(values).max(initial=0.0)) < 2**53
    numbers: list[float] = (values.astype(np.int64) if whole else values).tolist()
    return numbers
