"""Observers of a pipeline's steps: adaptation, recording, capture, and saved state.

    called ── taken ── begin ── waiting, waiting, ... ── end ── tell ── told       failed, at any time
                         └── waiting, ... ── again ──┘   if the update before the step was wrong
                                                                               moved, between two steps

The code that runs a step calls all observers at each moment, and knows nothing else about them.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.pipeline.ranks.crew import CrewObserver
from drumline.pipeline.ranks.tally import Tally, Told
from drumline.runtime.step import Step


class Observer(CrewObserver):
    """Does nothing at any of these moments; subclasses override some of them.

    Observers get `end` in reverse order, and everything else in order. Evaluations call only `tell` and `told`.
    """

    def called(self, step: Step) -> None:
        """React to the call of a training step; all ranks have reached it."""

    def taken(self, step: Step) -> None:
        """React to the batch being stored, before it is split."""

    def begin(self, step: Step) -> None:
        """React to the batch being split, just before the step runs."""

    def again(self, step: Step) -> None:
        """React to the opening of the step having run in vain, just before the step runs once more."""

    def end(self, step: Step) -> None:
        """React to the end of all rows in this process; everything is sent."""

    def tell(self, step: Step, each: Sequence[Told]) -> None:
        """See what the ranks of this process are about to tell all others about the step, and add to it."""

    def told(self, step: Step, tally: Tally, each: Sequence[Told]) -> None:
        """React after they have told it; the tally will hold what all ranks tell."""

    def moved(self) -> None:
        """React to layers having moved between ranks since the last step; the stages here are others now."""
