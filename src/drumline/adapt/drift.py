"""Tell a lasting change of a measured series from noise.

    seconds of stage 1's F     5.0 5.1 5.0 9.8 5.0 5.1     one noisy step: nothing
                               5.0 5.1 7.6 7.4 7.5         a change, told at the third step of 7.5
                               5.0 5.1 5.2 5.3 ... 5.7     a slow one, told once it has added up

Every series is compared with its reference: what was planned, or the median of its first steps. What exceeds half of
the threshold adds up over the steps (a two-sided CUSUM of logarithms), and what stays below wears it off again. One
step adds at most two fifths of what is needed. After a change, a series begins again with a new reference.

Nothing here knows what is measured, nor a clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

_FIRST = 5  # steps of a reference, if nothing was planned
_SUM = 3.2  # a change is told once the sum reaches so many thresholds
_STEPS = 2.5  # and after more than so many steps, however large it is
_LEAST_NOISE = 0.01  # series are never assumed to be steadier than this
_ROOM = 6.0  # times the noise that a sum must exceed at least


@dataclass(frozen=True, slots=True)
class Change:
    """A series that has changed: since which step, and its level before and after."""

    name: str
    step: int
    since: int
    before: float
    after: float

    @property
    def ratio(self) -> float:
        """The level after the change over that before."""
        return self.after / self.before

    def __str__(self) -> str:
        return f"{self.name} is {self.ratio:.2f} times what it was, since step {self.since}"


@dataclass(slots=True)
class _Series:
    threshold: float  # as a logarithm
    planned: float | None = None
    first: list[float] = field(default_factory=list)
    reference: float = 0.0
    slack: float = 0.0
    limit: float = 0.0
    most: float = 0.0
    up: float = 0.0
    down: float = 0.0
    since: int = 0
    recent: list[float] = field(default_factory=list)  # values since the sum left 0

    def see(self, step: int, value: float) -> tuple[int, float, float] | None:
        """Add a value; return since when, and from what to what, the series has changed."""
        if value <= 0 or not math.isfinite(value):
            return None
        if self.reference == 0.0 and not self._learn(value):
            return None
        most = self.most
        off = math.log(value / self.reference)
        off = min(max(off, -most), most)
        if self.up == self.down == 0.0:
            self.since, self.recent = step, []
        self.recent.append(value)
        self.up = max(0.0, self.up + off - self.slack)
        self.down = max(0.0, self.down - off - self.slack)
        if max(self.up, self.down) < self.limit:
            return None
        change = self.since, self.reference, median(self.recent[-3:])
        self.begin(None)
        return change

    def _learn(self, value: float) -> bool:
        self.first.append(value)
        if self.planned is not None:
            self._refer(self.planned, _LEAST_NOISE)
            return True
        if len(self.first) < _FIRST:
            return False
        reference = median(self.first)
        spread = median(abs(math.log(number / reference)) for number in self.first)
        self._refer(reference, max(_LEAST_NOISE, 1.5 * spread))
        return False

    def _refer(self, reference: float, noise: float) -> None:
        self.reference = reference
        self.slack = max(self.threshold / 2, noise)
        self.limit = max(_SUM * self.threshold, _ROOM * noise)
        self.most = self.slack + self.limit / _STEPS

    def begin(self, planned: float | None) -> None:
        self.planned, self.first, self.reference = planned, [], 0.0
        self.up = self.down = 0.0


class Drift:
    """Watches many series at once; `see` takes the values of a step, by name.

    >>> drift = Drift(threshold=0.1)
    >>> [drift.see(step, {"F": 1.0 if step < 8 else 1.5}) for step in range(10)][-1]
    []
    >>> print(*drift.see(10, {"F": 1.5}))
    F is 1.50 times what it was, since step 8
    """

    def __init__(self, *, threshold: float) -> None:
        self._threshold = math.log1p(threshold)
        self._series: dict[str, _Series] = {}

    def begin(self, planned: Mapping[str, float] | None = None) -> None:
        """Begin again, because something was changed: against what is planned now, or the steps that follow."""
        self._series = {name: _Series(self._threshold, value) for name, value in (planned or {}).items()}

    @property
    def levels(self) -> dict[str, float]:
        """The references that are known."""
        return {name: series.reference for name, series in self._series.items() if series.reference > 0}

    def see(self, step: int, values: Mapping[str, float]) -> list[Change]:
        """Add the values of a step, and return the series that have changed."""
        drifts = []
        for name, value in values.items():
            series = self._series.get(name)
            if series is None:
                series = self._series[name] = _Series(self._threshold)
            change = series.see(step, value)
            if change is not None:
                drifts.append(Change(name, step, *change))
        return drifts
