"""`verdict` of a pipeline."""

from __future__ import annotations

from drumline.engine.site import Methods
from drumline.features.validated.validated import Validation, Verdict


class ValidatedMethods(Methods):
    """What was decided about updates that ran ahead."""

    @property
    def verdict(self) -> Verdict | None:
        """What all ranks decided about the last update that `validated="after"` made; None before the first one.

        It is about the update before the last pipeline step, until `settle` is called.
        """
        return next(observer.verdict for observer in self._site.observers.each if isinstance(observer, Validation))
