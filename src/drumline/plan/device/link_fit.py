"""Seconds that grow with bytes: a latency and a bandwidth, fitted to what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drumline.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Line:
    """`seconds` for nothing, and `seconds_per_byte` more for each byte.

    >>> Line(1.0, 0.5).at(4)
    3.0
    """

    seconds: float = 0.0
    seconds_per_byte: float = 0.0

    def at(self, num_bytes: float) -> float:
        """Return the seconds of so many bytes."""
        return self.seconds + self.seconds_per_byte * num_bytes

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth; infinite where more bytes take no longer."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf


def fitted(points: Sequence[tuple[float, float]]) -> Line:
    """Return the line through (bytes, seconds) whose errors, as shares of the seconds, have the least squares.

    Neither latency nor bandwidth is ever negative: where the best line would have one, the best without it is taken.

    >>> line = fitted([(0, 2e-5), (1000, 3e-5), (2000, 4e-5)])
    >>> round(line.seconds * 1e6, 3), round(line.bytes_per_second / 1e6, 3)
    (20.0, 100.0)
    """
    if not points:
        raise PlanError("no message was measured", expected="(bytes, seconds) of one message or more")
    size, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    weight = 1 / np.maximum(seconds, 1e-12)  # a microsecond counts for more in a short message than in a long one
    if len(set(size.tolist())) > 1:
        columns = np.stack([weight, weight * size / size.max()], axis=1)
        (latency, slope), *_ = np.linalg.lstsq(columns, weight * seconds, rcond=None)
        slope = slope / size.max()
        if latency >= 0 and slope >= 0:
            return Line(float(latency), float(slope))
        if slope >= 0:
            return Line(0.0, float((weight**2 * size * seconds).sum() / (weight**2 * size * size).sum()))
    return Line(float((weight**2 * seconds).sum() / (weight**2).sum()), 0.0)
