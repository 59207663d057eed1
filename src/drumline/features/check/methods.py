"""`checked` of a pipeline."""

from __future__ import annotations

from drumline.engine.methods import Methods
from drumline.features.check.model_check import ModelCheck
from drumline.features.check.verdict import Checked


class CheckMethods(Methods):
    """The check of steps against the unsplit model."""

    @property
    def checked(self) -> Checked | None:
        """What the last check compared, what it cost and what it skipped; None before the first."""
        found = (one for one in self._site.observers.each if isinstance(one, ModelCheck))
        return next((one.checked for one in found), None)
