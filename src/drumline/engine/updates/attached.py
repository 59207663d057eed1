"""What may stand between gradients and optimizers, as far as these must know: each is a feature, and may be absent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.engine.ranks.tally import Handler


class Refuses(Protocol):
    """Knows of a step on which no optimizer may step."""

    def refuse(self) -> None:
        """Raise what was wrong with it, if anything was."""


class Scales(Handler, Protocol):
    """Scales the loss, and decides whether an update is left out."""

    @property
    def scale(self) -> float:
        """What the loss of the next step is multiplied by."""

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters whose gradients cannot be scaled."""

    def decide(self) -> bool:
        """Return whether to step; all ranks decide alike."""

    def forget(self) -> None:
        """Record that gradients were set to zero."""


class Copies(Protocol):
    """Copies of parameters that are updated in their place."""

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of the parameters of all stages here."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is updated for a parameter: its copy, or itself."""

    def drop(self, parameter: nn.Parameter) -> None:
        """Forget a parameter's copy."""

    def adopt(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Take a copy that another rank made and updated."""

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before an optimizer steps, give the copies their gradients."""

    def give(self, parameters: Iterable[nn.Parameter]) -> None:
        """After an optimizer has stepped, give parameters the values of their copies."""

    def moved(self) -> None:
        """Record that parameters have other memory, with the same values."""

    def catch_up(self) -> None:
        """Take over values that were changed by hand."""


class Divides(Protocol):
    """Parts of parameters that this line's optimizers update."""

    def divide(self, parameters: Sequence[nn.Parameter], kind: type[Optimizer]) -> None:
        """Divide parameters for an optimizer of a kind."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is updated of a parameter here: its part, or itself."""

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before an optimizer steps, give the parts their gradients."""

    def give(self, parameters: Sequence[nn.Parameter]) -> None:
        """After an optimizer has stepped, give all lines the values of all parts."""
