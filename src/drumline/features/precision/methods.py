"""`scaler` of a pipeline."""

from __future__ import annotations

from drumline.engine.site import Methods
from drumline.features.precision.scaler import LossScaler


class PrecisionMethods(Methods):
    """The scale of the loss."""

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler, the same on all ranks; None unless `precision` is "fp16"."""
        return next((observer for observer in self._site.observers.each if isinstance(observer, LossScaler)), None)
