"""Decide whether the machine was quiet during a measurement. If not, times must not be compared or used for advice.

Two signs show that it was busy: equal steps take unequal times, or other work already used the processors.

    quiet   ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄     the middle half of all steps lies within a tenth
    busy    ▄█▂▆▄▇▃█▅▂▇▄█▃▆     it spreads over a third or more: a gain of a few percent is lost in the noise
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

VARIES = 0.3  # distance of the quartiles, divided by the median
LOADED = 0.75  # share of the cores that other work may keep busy
FEWEST = 4  # lengths needed to estimate a spread


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How much equal work varied (quartiles over median), and how many of the `cores` were busy before it began.

    >>> Steadiness(spread=0.05, load=0.2, cores=2).sentence
    ''
    >>> print(Steadiness(spread=0.5, load=7.9, cores=2).sentence)
    This machine was busy: equal steps differ by 50%, and other work asked for 7.9 of its 2 cores.
    """

    spread: float | None = None
    load: float | None = None
    cores: int | None = None

    @property
    def reasons(self) -> list[str]:
        """The signs that the machine was busy; empty if it was quiet."""
        reasons = []
        if self.spread is not None and self.spread > VARIES:
            reasons.append(f"equal steps differ by {self.spread:.0%}")
        if self.load is not None and self.cores and self.load > LOADED * self.cores:
            reasons.append(f"other work asked for {self.load:.1f} of its {self.cores} cores")
        return reasons

    @property
    def busy(self) -> bool:
        """Whether the measured times are unreliable."""
        return bool(self.reasons)

    @property
    def sentence(self) -> str:
        """What to tell the user; empty if the machine was quiet."""
        return f"This machine was busy: {', and '.join(self.reasons)}." if self.busy else ""

    @property
    def withheld(self) -> str:
        """What to say instead of advice that would rely on these times."""
        return f"{self.sentence} Advice is withheld: measure again on a quiet machine."


def spread_of(seconds: Sequence[float]) -> float | None:
    """Return the distance of the quartiles over the median; None if there are too few values.

    >>> spread_of([1.0, 1.02, 0.99, 1.01, 5.0]) < 0.05, spread_of([1.0])
    (True, None)
    """
    if len(seconds) < FEWEST:
        return None
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else None
