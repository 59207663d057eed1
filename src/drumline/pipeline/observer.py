"""What watches a pipeline's steps: adaptation, recording, capture, and what is put aside meanwhile.

    called ── taken ── begin ── waiting, waiting, ... ── end          failed, whenever anything does

Whoever runs a step calls all observers at each moment, and knows nothing else of them.
"""

from __future__ import annotations

from drumline.runtime.executor import Step


class Observer:
    """Does nothing at any of these moments; whoever watches does something at some of them.

    Observers hear of `called`, `taken` and `begin` in their order, and of `end` in the opposite one. Evaluations have
    none of these four.
    """

    def called(self, step: Step) -> None:
        """Hear that a step that trains was called, and that all ranks have come to it."""

    def taken(self, step: Step) -> None:
        """Hear that the batch was taken in, and is not cut yet."""

    def begin(self, step: Step) -> None:
        """Hear that the batch was cut, and that the step runs from here on."""

    def waiting(self) -> None:
        """Hear that this rank has nothing to do until a message comes."""

    def end(self, step: Step) -> None:
        """Hear that all rows of this process have ended and what was sent has left."""

    def failed(self) -> None:
        """Hear that this process cannot go on."""
