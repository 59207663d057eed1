"""What programs fell short of their forecast: a simulator does not know all that a step takes.

    taken back         0.40 longer than forecast ──► for 32 steps, forecasts count as 1.40 times as long
    taken back again   0.30 longer               ──► for 128 steps, 1.30 times
    kept               forecasts count as they are

So in noise, programs that promise little come ever more rarely, and none is kept out for good.
"""

from __future__ import annotations

_MORE = 4  # times as many steps after each program that was taken back
_MOST = 4  # such lengthenings


class Shortfall:
    """By how much forecasts of programs have to be corrected; `patience` is how long the first correction counts.

    >>> shortfall = Shortfall(8)
    >>> shortfall.note(step=10, share=0.4)
    >>> shortfall.factor(41), shortfall.factor(42)
    (1.4, 1.0)
    >>> shortfall.note(step=50, share=0.3)
    >>> shortfall.factor(177), shortfall.factor(178)
    (1.3, 1.0)
    >>> shortfall.forget()
    >>> shortfall.factor(51)
    1.0
    >>> shortfall.note(step=60, share=0.2)
    >>> shortfall.factor(91), shortfall.factor(92)
    (1.2, 1.0)
    """

    def __init__(self, patience: int) -> None:
        self._patience = patience
        self.forget()

    def forget(self) -> None:
        """Hear that a program was kept: forecasts can be trusted again."""
        self._share, self._until, self._times = 0.0, 0, 0

    def note(self, *, step: int, share: float) -> None:
        """Hear that a program's steps took longer than forecast, by this share."""
        self._times = min(self._times + 1, _MOST)
        self._share = max(share, 0.0)
        self._until = step + self._patience * _MORE**self._times

    def factor(self, step: int) -> float:
        """Return by what to multiply a forecast."""
        return 1.0 + self._share if step < self._until else 1.0
