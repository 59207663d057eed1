"""How often a number of microbatches may change: numbers that were left come back ever more rarely.

    8 ──► 4            new: nothing is held against it
    4 ──► 2 ──► 4      4 was there before: no number changes for 32 steps
    4 ──► 8            8 was there before: for 128 steps, then 512, then 2,048
    steps take 1.25 times as long, or as short, as after the last change: all begins anew

The wait is of what the noise of a few steps proposes. A lasting change of what steps take ends it at once.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from statistics import median

_MORE = 4  # times as many steps after each return
_MOST = 4  # such lengthenings
_FAR = 1.25  # times what steps took after the last change, and something else is going on
_ENOUGH = 9  # steps that tell one level from another


class Tries:
    """Which numbers a pipeline has had; `patience` is how long the first wait is, but for one lengthening.

    >>> tries = Tries(8, first=8)
    >>> tries.settled(4, step=10); tries.are_due(11)
    True
    >>> tries.settled(8, step=20); tries.are_due(51), tries.are_due(52)
    (False, True)
    >>> tries.settled(4, step=60); tries.are_due(187), tries.are_due(188)
    (False, True)

    Steps that take much longer than they did are another matter:

    >>> tries.see([1.0] * 9); tries.see([1.2] * 9); tries.are_due(70)
    False
    >>> tries.see([1.3] * 9); tries.are_due(70)
    True
    """

    def __init__(self, patience: int, *, first: Hashable) -> None:
        self._patience, self._now = patience, first
        self._begin_anew(0.0)

    def _begin_anew(self, level: float) -> None:
        self._had, self._times, self._until, self._level = {self._now}, 0, 0, level

    def see(self, seconds: Collection[float]) -> None:
        """Look at what the last steps since a change took; fewer than nine tell nothing."""
        if len(seconds) < _ENOUGH:
            return
        level = median(seconds)
        if not self._level:
            self._level = level
        elif not 1 / _FAR <= level / self._level <= _FAR:
            self._begin_anew(level)

    def settled(self, number: Hashable, *, step: int) -> None:
        """Hear which number runs after a change, or after one was tried."""
        if number in self._had:
            self._times = min(self._times + 1, _MOST)
            self._until = step + self._patience * _MORE**self._times
        self._had.add(number)
        self._now, self._level = number, 0.0

    def are_due(self, step: int) -> bool:
        """Return whether another number may be taken or tried after a step."""
        return step >= self._until
