"""The loss scale of float16 training: one number and one decision, shared by all ranks.

Gradients of float16 activations are often too small for float16. So each backward starts from the loss's gradient times
a large scale, and every step ends by dividing the weights' gradients by it: `.grad` always holds the true gradient. If
the scale was too large, some gradient on some rank is infinite or NaN. Every rank learns this from the step's tally. So
either all ranks skip the optimizer's step and lower the scale, or none does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

from torch import Tensor, nn

from drumline.core.errors import ModelError, NonFiniteError
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport
from drumline.engine.state.keeper import Keeper, Named
from drumline.engine.updates.attached import Scales
from drumline.model.precision import LOW
from drumline.runtime.gradients import clip
from drumline.runtime.step import Step


def _admit(**_: Any) -> None:
    """Refuse nothing, where a scaler is used by itself."""


@dataclass(eq=False, repr=False)
class LossScaler(Scales, Observer, Keeper):
    """The loss scale and when it changes: the rules, defaults and state of `torch.amp.GradScaler`.

    Gradients of its `parameters` are scaled while a step runs, and true again after it. Checkpoints have the scale.

    A skipped optimizer step multiplies the scale by `backoff_factor`; `growth_interval` steps without a skip multiply
    it by `growth_factor`. If it would fall below `floor`, the gradients themselves are bad, and NonFiniteError is
    raised.

    >>> scaler = LossScaler(init_scale=8.0, growth_interval=2)
    >>> for number, overflow in enumerate([True, False, False]):
    ...     scaler.end(Step(number))
    ...     _ = scaler.handles(number, ["1"] if overflow else [])
    ...     print(scaler.decide(), scaler.scale)
    False 4.0
    True 4.0
    True 8.0
    """

    init_scale: InitVar[float] = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    floor: float = 2.0**-13
    refuse: Callable[..., None] = _admit  # what does not go with a scaled loss
    parameters: Callable[[], Sequence[nn.Parameter]] = tuple  # those of this process now

    def __post_init__(self, init_scale: float) -> None:
        self.is_on = True
        self.scale = init_scale
        self._good = 0  # optimizer steps since the scale last changed
        self._first = 0  # the first step whose gradients have not been cleared
        self._last = -1  # the last step that ran
        self._decided = -1  # the last step at the time of the last decision
        self._overflow = False
        self._skip = False

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters whose gradients cannot be unscaled exactly."""
        low = {str(param.dtype) for param in parameters if param.dtype in LOW and param.requires_grad}
        if low:
            self.refuse(parameters=", ".join(sorted(low)))

    def begin(self, step: Step) -> None:
        """Set the step's scale and apply it to earlier gradients, so that new ones can be added."""
        step.scale = self.scale
        self._multiply(step.scale)

    def end(self, step: Step) -> None:
        """Unscale the gradients."""
        self._multiply(1.0 / step.scale)
        self._last = step.number

    def _multiply(self, factor: float) -> None:
        clip.multiply([param.grad for param in self.parameters() if param.grad is not None], factor)

    def tell(self, step: Step, each: Sequence[RankReport]) -> None:
        """Tell the scale, which must be the same on all ranks."""
        if step.train:
            each[0].scale = step.scale

    def forget(self) -> None:
        """Record that gradients were set to zero: earlier overflows no longer count."""
        self._first = self._last + 1
        self._overflow = False

    def handles(self, number: int, ranks: str) -> bool:
        """Record that a step overflowed on some ranks, by name; raise if the scale cannot be lowered further."""
        if ranks and number >= self._first:
            self._overflow = True
            if self.scale * self.backoff_factor < self.floor:
                raise NonFiniteError(
                    f"step {number}: a loss or gradient on {ranks} is NaN or infinite, "
                    f"and the loss scale is already down to {self.scale:g}",
                    expected=f"finite numbers at a scale above {self.floor:g}; no optimizer has stepped",
                    fix="look for a NaN in the data, lower the learning rate, or use bf16",
                )
        return True

    def decide(self) -> bool:
        """Whether optimizers may step on the current gradients; the first call changes the scale."""
        if self._decided != self._last:
            self._decided = self._last
            self._skip, self._overflow = self._overflow, False
            self._update()
        return not self._skip

    def _update(self) -> None:
        if self._skip:
            self.scale *= self.backoff_factor
            self._good = 0
            return
        self._good += 1
        if self._good == self.growth_interval:
            self._good = 0
            if math.isfinite(self.scale * self.growth_factor):
                self.scale *= self.growth_factor

    def described(self) -> dict[str, Any]:
        """Return the scale and when it changes next."""
        return {"scaler": self.state_dict()}

    def take(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor], named: Named) -> None:
        """Continue with a stored scale, if there was one."""
        if content.get("scaler") is not None:
            self.load_state_dict(content["scaler"])

    def state_dict(self) -> dict[str, Any]:
        """Return the state, with the names that torch's scaler uses."""
        return {
            "scale": self.scale,
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
            "_growth_tracker": self._good,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state of this scaler or torch's; load the same state on every rank.

        >>> scaler = LossScaler(); scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0}); scaler.scale
        2.0
        """
        missing = sorted(self.state_dict().keys() - state.keys())
        if missing:
            raise ModelError(
                f"the scaler's state lacks {', '.join(missing)}",
                expected="the state_dict() of an enabled scaler",
            )
        self.scale = float(state["scale"])
        self.growth_factor = float(state["growth_factor"])
        self.backoff_factor = float(state["backoff_factor"])
        self.growth_interval = int(state["growth_interval"])
        self._good = int(state["_growth_tracker"])
