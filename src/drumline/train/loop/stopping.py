"""What keeps a run from its next update: steps that are skipped for a NaN, and a stop that somebody asked for.

An update whose loss or gradients are not finite on some rank is skipped by all ranks. It still counts as a step: the
learning rate and the data continue. So the run equals one that leaves out the optimizers' step there and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drumline.core.errors import NonFiniteError, counted
from drumline.pipeline.pipeline import Pipeline


@dataclass(frozen=True, slots=True)
class SkippedUpdate:
    """An update that was left out: why, and how many there were in a row with it."""

    step: int
    skipped: str
    in_a_row: int


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """Where a run ended early: by what, and the checkpoint from which it continues; "" if there was nothing to save."""

    step: int
    stopped: str
    checkpoint: str


class Skips:
    """Finds updates that must not be made, and ends a run that has `most` of them and one more in a row."""

    def __init__(self, pipe: Pipeline, most: int) -> None:
        self._pipe, self._most = pipe, most
        self._problem = ""  # of the update under way
        self.num_skipped = 0
        self.in_a_row = 0

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a pipeline step of an update, also if an earlier one was not finite: random numbers count the steps."""
        while True:  # every error is that of another step
            try:
                return step()
            except NonFiniteError as error:
                self._note(error)

    def clipped(self, most: float) -> Tensor | None:
        """Wait for the outcome of the update's steps on all ranks, and clip; returns the norm before."""
        self._settle()
        scaler: Any = getattr(self._pipe, "scaler", None)  # where low precision is attached
        norm = self._pipe.clip_grad_norm_(most) if most and not self._problem else None
        if not self._problem and scaler is not None and not scaler.decide():
            self._problem = f"a loss or gradient is NaN or infinite at the loss scale, now {scaler.scale:g}"
        elif norm is not None and not math.isfinite(float(norm)):
            self._problem = f"the norm of all gradients is {float(norm):g}"
        return norm

    def judged(self) -> Tensor | None:
        """Take note of what all ranks decided about the last update that did not wait for them; returns its norm."""
        verdict: Any = getattr(self._pipe, "verdict", None)  # where such updates are attached
        if verdict is None:
            return None
        self.note(verdict.ranks)
        norm: Tensor | None = verdict.norm
        return norm

    def note(self, ranks: str) -> None:
        """Take note of the ranks whose NaN left out an update, if any."""
        if ranks:
            self._problem = f"a loss or gradient on {ranks} is NaN or infinite"

    @property
    def allows(self) -> bool:
        """Whether the optimizers may step; the same on all ranks."""
        return not self._problem

    def ended(self, step: int) -> SkippedUpdate | None:
        """Count the update that ends here; returns it if it was skipped."""
        problem, self._problem = self._problem, ""
        if not problem:
            self.in_a_row = 0
            return None
        self.num_skipped += 1
        self.in_a_row += 1
        return SkippedUpdate(step, problem, self.in_a_row)

    def refuse(self, skipped: SkippedUpdate, checkpoint: str) -> None:
        """Raise, alike on all ranks, if too many updates in a row were skipped."""
        if skipped.in_a_row > self._most:
            last = f"continue from {checkpoint} with a lower learning rate" if checkpoint else "lower the learning rate"
            raise NonFiniteError(
                f"step {skipped.step}: {skipped.skipped}, in {counted(skipped.in_a_row, 'step')} in a row",
                expected=f"at most {self._most} in a row, as failures.max_skipped says",
                fix=f"{last}, or check the data of these steps",
            )

    def _settle(self) -> None:
        while True:  # every error is that of another step, once the gradients of the last one are gone
            try:
                self._pipe.settle()
                break
            except NonFiniteError as error:
                self._note(error)
                self._pipe.zero_grad()

    def _note(self, error: NonFiniteError) -> None:
        self._problem = self._problem or error.error.partition(": ")[2]  # its number counts steps, not updates
