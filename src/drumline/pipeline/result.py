"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor


@dataclass
class StepResult:
    """The outcome of one step. `loss` is the whole batch's, on every rank; reading it may wait for the last stage."""

    step: int
    _loss: Callable[[], Tensor | None]
    _output: Any = None

    @cached_property
    def loss(self) -> Tensor | None:
        """The mean loss over the batch, detached; None where no target was given."""
        return self._loss()

    @property
    def output(self) -> Any:
        """The model's output for the whole batch, after `eval_step` on ranks that hold the last stage; else None."""
        return self._output

    def __repr__(self) -> str:
        return f"StepResult(step={self.step})"
