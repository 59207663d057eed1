"""What comes in with a step: the batch where the first stage is, the target and its loss where the last one is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import BatchError, ModelError
from drumline.runtime.batch import cut, num_rows, shares
from drumline.runtime.executor import Step
from drumline.runtime.values import moved, pack

LossFunction = Callable[..., Tensor]
Weigh = Callable[[Any], float | Tensor]
_NOTHING: Any = object()  # the target of a microbatch that weighs nothing


class Intake:
    """Cuts batches and targets into microbatches, weighs these, and takes their losses."""

    def __init__(
        self, loss_fn: LossFunction | None, weigh: Weigh | None, device: torch.device, *, num_microbatches: int
    ) -> None:
        self.loss_fn = loss_fn
        self.weigh = weigh
        self.device = device
        self.num_microbatches = num_microbatches
        self.precise = False  # whether shares of the loss are needed in double precision
        self._weights: list[float | Tensor] = []
        self._shares: Sequence[Tensor] = ()

    def take(self, step: Step, batch: Any, target: Any, ends: Collection[str], rank: int) -> None:
        """Take batch and target in where `ends`, "first" and "last", say that their stages are."""
        if "first" in ends:
            if batch is None:
                raise BatchError(f"rank {rank} holds the first stage and got no batch", fix="pass it to step")
            step.batch = moved(batch, self.device)
        if "last" in ends and (target is not None or step.train):
            if target is None:
                raise BatchError(f"rank {rank} holds the last stage and got no target", fix="pass target= to step")
            step.target = moved(target, self.device)

    def cut(self, step: Step) -> None:
        """Cut batch and target into microbatches, and weigh these."""
        if step.batch is not None:
            step.inputs = cut(step.batch, self.num_microbatches)
        if step.target is None:
            return
        targets = cut(step.target, self.num_microbatches, what="the target")
        if step.batch is not None and num_rows(step.batch) != num_rows(step.target):
            raise BatchError(
                f"the batch has {num_rows(step.batch)} rows and the target {num_rows(step.target)}",
                expected="as many in both",
            )
        weights = [_plain((self.weigh or num_rows)(one)) for one in targets]
        step.shares = self._shares_of(weights)
        step.targets = [
            one if isinstance(weight, Tensor) or weight else _NOTHING
            for one, weight in zip(targets, weights, strict=True)
        ]

    def _shares_of(self, weights: list[float | Tensor]) -> Sequence[Tensor]:
        """Return each microbatch's share of the loss as a tensor, kept as long as they stay the same."""
        if any(isinstance(weight, Tensor) for weight in weights):
            return [torch.as_tensor(share).to(self.device) for share in shares(weights)]
        if weights != self._weights:
            parts = torch.tensor(shares(weights), dtype=torch.float64)
            self._shares = parts.to(self.device, torch.float64 if self.precise else torch.float32).unbind()
            self._weights = weights
        return self._shares

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the loss of one microbatch's output."""
        assert self.loss_fn is not None
        if target is _NOTHING:
            # A mean over nothing is NaN, and its gradient too: a microbatch without weight adds zeros instead.
            made = [one for one in pack(output)[0] if one.requires_grad]
            return sum(((one.float() * 0.0).nan_to_num().sum() for one in made), torch.zeros(()))
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            what = f"a tensor of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"loss_fn returned {what}", expected="a tensor without dimensions: the microbatch's mean")
        return loss


def _plain(weight: float | Tensor) -> float | Tensor:
    """Return a weight as a number, unless reading it would mean waiting for a device."""
    return float(weight) if isinstance(weight, Tensor) and weight.device.type == "cpu" else weight
