"""What to change about a running pipeline, and what came of it: for all ranks, the log and the folder of the run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.core.program import Program
from drumline.plan.cut.cuts import Counts

PROGRAM, CUT, NUMBER = "program", "cut", "microbatches"


@dataclass(frozen=True, slots=True)
class Arrangement:
    """How a pipeline runs now: its program, and the blocks of every stage if they are known."""

    program: Program
    counts: Counts = ()

    @property
    def words(self) -> str:
        """What it is, for the log."""
        cut = f", {' | '.join(map(str, self.counts))} blocks" if self.counts else ""
        return f"{self.program.name} with {self.program.num_microbatches} microbatches{cut}"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change: the new setting and the old one, the reason, and the seconds of a step before and, as predicted, after.

    `is_back` says that it undoes a change without the expected gain.
    """

    step: int
    kind: str
    why: str
    before: Arrangement
    after: Arrangement
    seconds: float
    predicted: float
    is_back: bool = False
    is_trial: bool = False  # to learn what another size takes
    scale: float = 1.0  # what a measured step took for each second of a simulated one, before

    @property
    def gain(self) -> float:
        """The share of a step that it should save."""
        return 1.0 - self.predicted / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of the run's decisions."""
        return {
            "step": self.step,
            "kind": self.kind,
            "why": self.why,
            "before": self.before.words,
            "after": self.after.words,
            "seconds": self.seconds,
            "predicted": self.predicted,
            "back": self.is_back,
            "trial": self.is_trial,
        }

    def __str__(self) -> str:
        what = f"back to {self.after.words}" if self.is_back else f"from {self.before.words} to {self.after.words}"
        ms = f"{self.seconds * 1e3:.1f} ms a step, predicted {self.predicted * 1e3:.1f} ms ({-self.gain:+.1%})"
        return f"{self.kind}: {what} because {self.why}; {ms}"


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """What came of a change: the step as measured, and what it would take by now without the change."""

    step: int
    proposal: Proposal
    real: float
    without: float
    kept: bool

    @property
    def gain(self) -> float:
        """The share of a step that it saves."""
        return 1.0 - self.real / self.without

    def to_json(self) -> dict[str, Any]:
        """Return it as a line of the run's decisions."""
        decided = self.proposal
        return {
            "step": self.step,
            "kind": decided.kind,
            "of": decided.step,
            "predicted": decided.predicted,
            "real": self.real,
            "without": self.without,
            "kept": self.kept,
        }

    def __str__(self) -> str:
        ms = f"{self.real * 1e3:.1f} ms a step instead of {self.without * 1e3:.1f} ms ({-self.gain:+.1%})"
        return f"{self.proposal.kind} of step {self.proposal.step}: {ms}, {'kept' if self.kept else 'taken back'}"
