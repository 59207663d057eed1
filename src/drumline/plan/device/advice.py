"""Advice: what to change and what it gains, or why a choice loses; shared by runs, traces, comparisons and plans.

A cost is a dataclass of numbers, one per item. Two costs are compared item by item, whether they belong to programs on
ranks or to layouts on clusters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

LEAST_GAIN = 0.01  # share of the makespan; a smaller gain is not worth a change
Items = list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change: a sentence, the share of the makespan it is predicted to save, and what to pass to `Pipeline`.

    `assumes` says what the prediction assumes beyond the measurements. For a plan, the gain is in throughput and the
    settings are those it was planned with.
    """

    kind: str
    sentence: str
    gain: float = 0.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    assumes: str = ""

    @property
    def weight(self) -> float:
        """How much it counts against others: a gain that relies on an assumption counts half."""
        return self.gain / 2 if self.assumes else self.gain

    def __str__(self) -> str:
        return self.sentence + (f" ({self.assumes})" if self.assumes else "")


@dataclass(frozen=True, slots=True)
class Advice:
    """Remedies, the most important first; `nothing` is the message if none gains the `least`."""

    remedies: tuple[Remedy, ...]
    least: float = LEAST_GAIN
    nothing: str = f"No change that was tried is predicted to gain {LEAST_GAIN:.0%} or more."

    @property
    def best(self) -> Remedy | None:
        """The remedy to apply first; None if none is predicted to gain."""
        first = self.remedies[0] if self.remedies else None
        return first if first is not None and first.gain >= self.least else None

    @property
    def sentence(self) -> str:
        """What to do."""
        return self.nothing if self.best is None else f"{self.best}."

    @property
    def others(self) -> tuple[Remedy, ...]:
        """The remaining remedies."""
        return self.remedies if self.best is None else self.remedies[1:]

    def __str__(self) -> str:
        return " ".join([self.sentence, *(f"{other}." for other in self.others)])

    def to_json(self) -> dict[str, Any]:
        """Return the advice as a JSON object."""
        return {"sentence": self.sentence, "remedies": [asdict(remedy) for remedy in self.remedies]}


def predicted(gain: float) -> str:
    """Format a gain as the change of the step time.

    >>> predicted(0.137)
    'predicted -14%'
    """
    return f"predicted {-gain:+.0%}"


def lost_and_saved(chosen: Any, other: Any, least: float = 0.0) -> tuple[Items, Items]:
    """Return what `other` loses against `chosen` and what it saves, item by item, the largest first.

    Differences up to `least` do not count; if it loses nothing, the item with the smallest saving stands for that.

    >>> from drumline.plan.cluster.loads import Volumes
    >>> lost_and_saved(Volumes(1, 2, 0, 0, 0), Volumes(4, 0, 0, 1, 0))
    ([('tensor', 3), ('pipeline', 1)], [('context', 2)])
    """
    mine, theirs = asdict(chosen), asdict(other)
    by = sorted(((item, theirs[item] - mine[item]) for item in mine), key=lambda pair: -pair[1])
    lost = [(item, more) for item, more in by if more > least]
    return lost or by[:1], [(item, -more) for item, more in reversed(by) if more < -least]


def less_activations(over: float, activations: float) -> str | None:
    """Say what share of the activations must go to save this many bytes; None if even all are not enough.

    >>> less_activations(1.0, 4.0), less_activations(5.0, 4.0)
    ('25% less activation memory', None)
    """
    return f"{over / activations:.0%} less activation memory" if over < activations else None
