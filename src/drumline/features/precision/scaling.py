"""Steps whose loss is scaled: gradients are scaled while they run, and true again after them."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.ranks.observer import Observer
from drumline.engine.state.tensors import Holdings
from drumline.features.precision.scaler import LossScaler, multiplied
from drumline.runtime.step import Step


@dataclass(frozen=True, eq=False)
class Scaling(Observer):
    """Scales the loss of every step."""

    scaler: LossScaler
    holdings: Holdings

    def begin(self, step: Step) -> None:
        """Set the step's scale and apply it to earlier gradients, so that new ones can be added."""
        step.scale = self.scaler.scale
        self._multiply(step.scale)

    def end(self, step: Step) -> None:
        """Unscale the gradients."""
        self._multiply(1.0 / step.scale)
        self.scaler.ran(step.number)

    def _multiply(self, factor: float) -> None:
        multiplied([one.grad for one in self.holdings.parameters() if one.grad is not None], factor)
