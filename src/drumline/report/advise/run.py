"""What to change about a run, in one sentence with a predicted gain, and all else that would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.report.advise.remedy import LEAST_GAIN, Remedy
from drumline.report.advise.remedy_cut import recut
from drumline.report.advise.remedy_program import other_counts, other_schedule
from drumline.report.advise.remedy_rest import slow_link, time_outside
from drumline.report.run.observed import Observed

_REMEDIES = (recut, other_counts, slow_link, other_schedule, time_outside)


@dataclass(frozen=True, slots=True)
class Advice:
    """Remedies, the one that counts most first."""

    remedies: tuple[Remedy, ...]

    @property
    def best(self) -> Remedy | None:
        """The one to take first; None where nothing is predicted to gain."""
        first = self.remedies[0] if self.remedies else None
        return first if first is not None and first.gain >= LEAST_GAIN else None

    @property
    def sentence(self) -> str:
        """What to do."""
        if self.best is None:
            return f"No change that was tried is predicted to gain {LEAST_GAIN:.0%} or more."
        return f"{self.best}."

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for JSON."""
        return {"sentence": self.sentence, "remedies": [one.to_json() for one in self.remedies]}


def advise_run(seen: Observed) -> Advice:
    """Return what is predicted to make a run's steps shorter; changes that rest on assumptions count half."""
    found = [remedy for remedies in _REMEDIES for remedy in remedies(seen)]
    return Advice(tuple(sorted(found, key=lambda one: -one.weight)))
