"""Steps whose loss is scaled: gradients are scaled while they run, and true again after them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport
from drumline.engine.state.keeper import Keeper, Named
from drumline.engine.state.tensors import Holdings
from drumline.features.precision.scaler import LossScaler
from drumline.runtime.gradients import clip
from drumline.runtime.step import Step


@dataclass(frozen=True, eq=False)
class Scaling(Observer, Keeper):
    """Scales the loss of every step; checkpoints have the scale."""

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

    def tell(self, step: Step, each: Sequence[RankReport]) -> None:
        """Tell the scale, which must be the same on all ranks."""
        if step.train:
            each[0].scale = step.scale

    def described(self) -> dict[str, Any]:
        """Return the scale and when it changes next."""
        return {"scaler": self.scaler.state_dict()}

    def take(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor], named: Named) -> None:
        """Go on with a stored scale, if there was one."""
        if content.get("scaler") is not None:
            self.scaler.load_state_dict(content["scaler"])

    def _multiply(self, factor: float) -> None:
        clip.multiply([param.grad for param in self.holdings.parameters() if param.grad is not None], factor)
