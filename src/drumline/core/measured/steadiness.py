"""Whether a machine was quiet while something was measured on it, so that times may be compared and advice given.

Two signs tell. Steps of the same work vary in length; and a rank computes for longer than the processor worked for it:

    wall seconds in actions    ████████████████████
    processor seconds of them  ████████████░░░░░░░░   60%: the rest went to somebody else
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

VARIES = 0.3  # distance of the quartiles over the median; quiet machines stay under a tenth
SHARED = 0.8  # processor seconds over wall seconds; quiet machines stay over 0.95
FEWEST = 4  # lengths from which a spread can be told


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How much lengths varied (distance of the quartiles over the median), and what the processors gave of the time.

    >>> Steadiness(spread=0.05, given=0.99).sentence
    ''
    >>> print(Steadiness(spread=0.5, given=0.6).sentence)
    This machine was busy: equal steps differ by 50%, and ranks got 60% of the processor time they asked for.
    """

    spread: float | None = None
    given: float | None = None

    @property
    def reasons(self) -> list[str]:
        """What shows that the machine was busy; nothing where it was quiet."""
        reasons = []
        if self.spread is not None and self.spread > VARIES:
            reasons.append(f"equal steps differ by {self.spread:.0%}")
        if self.given is not None and self.given < SHARED:
            reasons.append(f"ranks got {self.given:.0%} of the processor time they asked for")
        return reasons

    @property
    def busy(self) -> bool:
        """Whether times taken then are unreliable."""
        return bool(self.reasons)

    @property
    def sentence(self) -> str:
        """What to tell the user; nothing where the machine was quiet."""
        return f"This machine was busy: {', and '.join(self.reasons)}." if self.busy else ""


def steadiness(seconds: Sequence[float], given: Sequence[float] = ()) -> Steadiness:
    """Return how steady these lengths of equal work are; `given` are shares of processor time, the middle one counts.

    >>> steadiness([1.0, 1.02, 0.99, 1.01, 5.0]).busy, steadiness([1.0, 2.0, 1.0, 3.0, 2.0]).busy
    (False, True)
    """
    spread = None
    if len(seconds) >= FEWEST and median(seconds) > 0:
        low, middle, high = quantiles(seconds, n=4, method="inclusive")
        spread = (high - low) / middle
    return Steadiness(spread, median(given) if given else None)
