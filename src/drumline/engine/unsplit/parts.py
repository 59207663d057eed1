"""What a line has of the unsplit model, and how to compare it: all of it, unless lines of a mesh hold parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.model.loss.factors import Factors


class Parts:
    """A line that has all of every parameter and sequence; a subclass compares parts."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self.divides_sequences = False

    @property
    def is_on(self) -> bool:
        """Whether lines have parts of anything."""
        return False

    def whole(self) -> AbstractContextManager[None]:
        """Have the model as in one process inside."""
        return nullcontext()

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return of a whole tensor the part that a parameter is of its whole."""
        return whole

    def seen_over(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the axes along which each line sees a part of a parameter's gradient in the step."""
        return ()

    def is_summed(self, parameter: Tensor) -> bool:
        """Whether tokens of several lines went through what this line holds of a parameter."""
        return False

    def is_settled_later(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient can only be compared once lines have added up theirs."""
        return bool(self.seen_over(parameter)) or self.is_summed(parameter)

    def whole_gradient(self, gradient: Tensor | None, parameter: Tensor) -> Tensor:
        """Return the gradient that all lines together saw in the step, on the host."""
        return self.nothing(parameter) if gradient is None else gradient

    def wanted(self, whole: Tensor | None, parameter: Tensor) -> tuple[Tensor, bool]:
        """Return this line's part of what the model gives by itself on all lines, and whether all of these ran it."""
        return self.nothing(parameter) if whole is None else whole, whole is not None

    def nothing(self, parameter: Tensor) -> Tensor:
        """Return zeros of the shape of a parameter's whole."""
        return torch.zeros(parameter.shape, dtype=parameter.dtype)

    def counts(self, shares: Sequence[Any], device: torch.device) -> list[float]:
        """Return on how many of the lines that exchange within it each microbatch counts."""
        return [float(float(share) != 0.0) for share in shares]

    def share(self, own_share: float | Tensor, device: torch.device) -> float:
        """Return what part of the loss whole sequences are, of which each line has a part with its own share."""
        return float(own_share)

    def factors(self, share: float, own_factors: Factors, device: torch.device) -> Factors:
        """Return the factors of a loss's parts in whole sequences, of which each line has its own in its part."""
        return own_factors

    def total(self, number: float | Tensor, device: torch.device) -> float:
        """Return the sum of a number over the lines that see parts of the same sequences."""
        return float(number)

    def outputs(self, output: Any, whole: Any) -> tuple[Any, Any]:
        """Return of an output and of the whole one what must be equal."""
        return output, whole
