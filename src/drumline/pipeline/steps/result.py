"""What a step returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from drumline.model.microbatches import Microbatches
from drumline.model.values import joined, pack
from drumline.runtime.step import Step


@dataclass
class StepResult:
    """The outcome of one step. `loss` is that of the whole batch, on every rank; reading may wait for the last stage.

    `step` counts training steps from 0, as the run folder does; an evaluation has the number of the step that follows.

    `output` is the model's output for the whole batch, if requested and this rank has the last stage; else None.
    """

    step: int
    _loss: Callable[[], Tensor | None] = field(repr=False)
    output: Any = field(default=None, repr=False)
    _skipped: Mapping[int, str] = field(default_factory=dict, repr=False)

    @cached_property
    def loss(self) -> Tensor | None:
        """The mean loss over the batch, detached; None without a target."""
        return self._loss()

    @property
    def skipped(self) -> str:
        """With a schedule without a flush, the ranks whose NaN or infinity left out an update of this step, if any.

        It is known `pipe.steps_in_flight` steps later, and after `pipe.settle()`; until then it is empty.
        """
        return self._skipped.get(self.step, "")


def output_of(step: Step) -> Any:
    """Return the last stage's output for the whole batch; None if the stage is elsewhere or nobody wanted it.

    If the user split the batch, the output comes as `Microbatches`.
    """
    order = sorted(step.outputs)
    if not order:
        return None
    if step.order:  # as they were given
        order = sorted(order, key=step.order.__getitem__)
    outputs = [step.outputs[number] for number in order]
    if step.is_split or len({tuple(tensor.shape[1:] for tensor in pack(value)[0]) for value in outputs}) > 1:
        return Microbatches(outputs)
    return joined(outputs, [step.shares[number] for number in order] if len(step.shares) else [])
