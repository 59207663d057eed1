"""Whether a pipeline computes the same as its unsplit model: this class checks nothing."""

from __future__ import annotations

from drumline.core.errors import ModelError
from drumline.engine.ground import Ground
from drumline.engine.ranks.observer import Observer
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.unsplit.parts import Parts


class NoCheck(Observer):
    """Checks no step; a subclass compares some steps with the unsplit model.

    It is made before lines divide the model. `different` are two ranks and the parameter for which they were given
    different values, if there is one.
    """

    def __init__(
        self, setting: PipelineSetup, cut: ModelCut, parts: Parts, different: tuple[int, int, str] | None
    ) -> None:
        pass

    def attach(self, ground: Ground) -> None:
        """Take note of what runs the steps."""

    def remember(self, refusal: ModelError) -> None:
        """Refuse all that follows for a reason that was found elsewhere."""

    def refuse(self) -> None:
        """Raise what was found wrong, if anything was: nothing may be built on it."""
