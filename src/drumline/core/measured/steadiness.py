"""Whether a machine was quiet while something was measured on it, so that times may be compared and advice given.

Two signs tell that it was not: equal steps that take unequal times, and processors that had other work already.

    quiet   ▄▄▄▄▄▄▄▄▄▄▄▄▄▄▄     the middle half of all steps lies within a tenth
    busy    ▄█▂▆▄▇▃█▅▂▇▄█▃▆     it spreads over a third or more: a gain of a few percent cannot be told from chance
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

VARIES = 0.3  # distance of the quartiles over the median
LOADED = 0.75  # of the cores: how many of them other work may keep busy
FEWEST = 4  # lengths from which a spread can be told


@dataclass(frozen=True, slots=True)
class Steadiness:
    """How far equal work spread (quartiles over median), and how many of the `cores` were busy before it began.

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
        """What shows that the machine was busy; nothing where it was quiet."""
        reasons = []
        if self.spread is not None and self.spread > VARIES:
            reasons.append(f"equal steps differ by {self.spread:.0%}")
        if self.load is not None and self.cores and self.load > LOADED * self.cores:
            reasons.append(f"other work asked for {self.load:.1f} of its {self.cores} cores")
        return reasons

    @property
    def busy(self) -> bool:
        """Whether times taken then are unreliable."""
        return bool(self.reasons)

    @property
    def sentence(self) -> str:
        """What to tell the user; nothing where the machine was quiet."""
        return f"This machine was busy: {', and '.join(self.reasons)}." if self.busy else ""

    @property
    def withheld(self) -> str:
        """What to say instead of advice that would rest on such times."""
        return f"{self.sentence} Advice is withheld: measure again on a quiet machine."


def spread_of(seconds: Sequence[float]) -> float | None:
    """Return the distance of the quartiles over the median; None where there are too few to tell.

    >>> spread_of([1.0, 1.02, 0.99, 1.01, 5.0]) < 0.05, spread_of([1.0])
    (True, None)
    """
    if len(seconds) < FEWEST:
        return None
    low, middle, high = quantiles(seconds, n=4, method="inclusive")
    return (high - low) / middle if middle > 0 else None
