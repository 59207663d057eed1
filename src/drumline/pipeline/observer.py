"""What watches a pipeline's steps: adaptation, recording, capture, and what is put aside meanwhile.

    called ── taken ── begin ── waiting, waiting, ... ── end ── tell ── told       failed, whenever anything does

Whoever runs a step calls all observers at each moment, and knows nothing else of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.pipeline.crew import CrewObserver
from drumline.pipeline.record.tally import Tally, Told
from drumline.runtime.executor import Step


class Observer(CrewObserver):
    """Does nothing at any of these moments; whoever watches does something at some of them.

    Observers hear of `end` in the opposite order, and of all else in their own. Evaluations have `tell` and `told`
    alone.
    """

    def called(self, step: Step) -> None:
        """Hear that a step that trains was called, and that all ranks have come to it."""

    def taken(self, step: Step) -> None:
        """Hear that the batch was taken in, and is not cut yet."""

    def begin(self, step: Step) -> None:
        """Hear that the batch was cut, and that the step runs from here on."""

    def end(self, step: Step) -> None:
        """Hear that all rows of this process have ended and what was sent has left."""

    def tell(self, step: Step, each: Sequence[Told]) -> None:
        """Hear what the ranks of this process are about to tell all others of the step, and add to it."""

    def told(self, step: Step, tally: Tally, each: Sequence[Told]) -> None:
        """Hear that they have; the tally is what will be heard of all ranks."""
