"""What could be changed about a run, and what that is predicted to gain.

A prediction is the difference of two simulations with the run's own seconds, as a part of the measured makespan. What
the simulator does not know, the executor's own time, is taken to stay with every action.

    measured   ├────────── simulated ──────────┤── overhead ──┤
    changed    ├──── simulated ─────┤── overhead ──┤              the gain is what the second is shorter
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LEAST_GAIN = 0.01  # of the makespan; less is no reason to change anything


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change: a sentence, the share of the makespan it is predicted to save, and what to pass to `Pipeline`.

    `assumes` is what the prediction takes for true beyond what was measured.
    """

    kind: str
    sentence: str
    gain: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumes: str = ""

    @property
    def weight(self) -> float:
        """How much it counts against others: a gain that rests on an assumption counts half."""
        return self.gain / 2 if self.assumes else self.gain

    def __str__(self) -> str:
        return self.sentence + (f" ({self.assumes})" if self.assumes else "")

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for JSON."""
        return asdict(self)


def predicted(gain: float) -> str:
    """Return a gain as it is written: how the step's seconds change.

    >>> predicted(0.137)
    'predicted -14%'
    """
    return f"predicted {-gain:+.0%}"
