"""What may stand between gradients and optimizers, as these see it: here, nothing; each has a subclass in a feature."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.engine.ranks.tally import Handler


class Refuses(Protocol):
    """Knows of a step on which no optimizer may step."""

    def refuse(self) -> None:
        """Raise what was wrong with it, if anything was."""


class Scales(Handler):
    """Leaves the loss as it is; a subclass scales it, and decides whether an update is left out."""

    is_on = False
    scale = 1.0  # what the loss of the next step is multiplied by

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Refuse parameters whose gradients cannot be scaled."""

    def handles(self, number: int, ranks: str) -> bool:
        """Take note of ranks with a NaN in a step, by name; return whether nobody else needs to."""
        return False

    def decide(self) -> bool:
        """Return whether to step; all ranks decide alike."""
        return True

    def forget(self) -> None:
        """Record that gradients were set to zero."""


class ParameterCopies:
    """Has parameters updated themselves; a subclass has copies that are updated in their place."""

    is_on = False

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take note of the parameters of all stages here."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is updated for a parameter: its copy, or itself."""
        return parameter

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


class Divides:
    """Has this line's optimizers update whole parameters; a subclass has them update parts."""

    def divide(self, parameters: Sequence[nn.Parameter], kind: type[Optimizer]) -> None:
        """Divide parameters for an optimizer of a kind."""

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is updated of a parameter here: a part, or all of it."""
        return parameter

    def handed_over(self, parameter: nn.Parameter) -> Any:
        """Return how a parameter is divided, for the rank to which it moves; None if it is not."""

    def drop(self, parameter: nn.Parameter) -> None:
        """Forget a parameter that has left."""

    def take_over(self, parameter: nn.Parameter, division: Any) -> None:
        """Divide a parameter that has come, as it was divided where it was."""

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before an optimizer steps, give the parts their gradients."""

    def give(self, parameters: Sequence[nn.Parameter]) -> None:
        """After an optimizer has stepped, give all lines the values of all parts."""
