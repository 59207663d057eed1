"""What to change about a step, in one sentence with a predicted gain, and all else that would help.

                  cut, link, microbatches, time outside    schedule    stages, lost time
run of ours       from its records                         yes         (the cut and the link say it better)
foreign trace     not known                                yes         from its idle time by cause
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.report.advise.cut import equal_stages, recut
from drumline.report.advise.program import other_counts, other_schedule
from drumline.report.advise.remedy import LEAST_GAIN, Evidence, Remedy
from drumline.report.advise.waits import lost_time, slow_link, time_outside

_REMEDIES = (recut, equal_stages, other_counts, slow_link, other_schedule, lost_time, time_outside)


@dataclass(frozen=True, slots=True)
class Advice:
    """Remedies, the one that counts most first; `nothing` is what to say where none gains the `least` of all."""

    remedies: tuple[Remedy, ...]
    least: float = LEAST_GAIN
    nothing: str = f"No change that was tried is predicted to gain {LEAST_GAIN:.0%} or more."

    @property
    def best(self) -> Remedy | None:
        """The one to take first; None where nothing is predicted to gain."""
        first = self.remedies[0] if self.remedies else None
        return first if first is not None and first.gain >= self.least else None

    @property
    def sentence(self) -> str:
        """What to do."""
        return self.nothing if self.best is None else f"{self.best}."

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for JSON."""
        return {"sentence": self.sentence, "remedies": [one.to_json() for one in self.remedies]}


def advise(seen: Evidence) -> Advice:
    """Return what is predicted to make a step shorter; changes that rest on assumptions count half."""
    found = [remedy for remedies in _REMEDIES for remedy in remedies(seen)]
    ordered = tuple(sorted(found, key=lambda one: -one.weight))
    if seen.plan is not None:
        return Advice(ordered)
    return Advice(
        ordered,
        least=0.03,
        nothing="Nothing stands out: no single change that the traces show would save 3% of the pipeline's time.",
    )
