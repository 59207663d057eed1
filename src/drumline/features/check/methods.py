"""`checked` of a pipeline."""

from __future__ import annotations

from drumline.engine.site import Methods
from drumline.features.check.model_check import ModelCheck
from drumline.features.check.verdict import CheckReport


class CheckMethods(Methods):
    """The check of steps against the unsplit model."""

    @property
    def checked(self) -> CheckReport | None:
        """What the last check compared, what it cost and what it skipped; None before the first."""
        checks = (observer for observer in self._site.observers.each if isinstance(observer, ModelCheck))
        return next((check.checked for check in checks), None)
