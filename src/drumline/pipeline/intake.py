"""What comes in with a step: the batch where the first stage is, the target and its loss where the last one is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, ModelError
from drumline.pipeline.models import inputs_for, is_chain
from drumline.pipeline.own_loss import OwnWeight, own_loss
from drumline.runtime.batch import cut, num_rows, shares
from drumline.runtime.cut import Model
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
        for name, given in (("loss_fn", loss_fn), ("loss_weight", weigh)):
            if given is not None and (not callable(given) or isinstance(given, type)):
                what = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
                fix = f"make one: {given.__name__}()" if isinstance(given, type) else ""
                raise ModelError(f"{name} is {what}", expected="a function", fix=fix)
        self.loss_fn = loss_fn
        self.weigh = weigh
        self.device = device
        self.num_microbatches = num_microbatches
        self._is_chain = True
        self._trains = True
        self.own = False  # whether the model computes its loss itself
        self.precise = False  # whether shares of the loss are needed in double precision
        self._weights: list[float | Tensor] = []
        self._shares: Sequence[Tensor] = ()

    def follow(self, model: Model) -> None:
        """Learn what the model is called with, and whether it computes its loss itself."""
        self._is_chain = is_chain(model)
        if not self._is_chain and self.loss_fn is None:
            self.own = True
            self.weigh = self.weigh or OwnWeight(cast(nn.Module, model))

    @property
    def has_loss(self) -> bool:
        """Whether there is a loss to train by."""
        return self.own or self.loss_fn is not None

    def called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a step was called with as the value that the first block takes."""
        return inputs_for(args, kwargs, is_chain=self._is_chain)

    def take(self, step: Step, batch: Any, target: Any, ends: Collection[str], rank: int) -> None:
        """Take batch and target in where `ends`, "first" and "last", say that their stages are."""
        self._trains = step.train
        if "first" in ends:
            if batch is None:
                raise BatchError(f"rank {rank} holds the first stage and got no batch", fix="pass it to step")
            step.batch = moved(batch, self.device)
        if self.own:
            self._take_own(step, batch, ends, rank)
        elif "last" in ends and (target is not None or step.train):
            if target is None:
                raise BatchError(f"rank {rank} holds the last stage and got no target", fix="pass target= to step")
            step.target = moved(target, self.device)

    def _take_own(self, step: Step, batch: Any, ends: Collection[str], rank: int) -> None:
        """Take in the batch where the last stage is, for how much each microbatch counts is seen in it."""
        if "last" in ends:
            if batch is None:
                raise BatchError(
                    f"rank {rank} holds the last stage and got no batch",
                    expected="the batch there too: the model computes its loss itself, and the labels are counted",
                )
            step.target = moved(batch, self.device) if step.batch is None else step.batch

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

    def loss(self, output: Any, target: Any) -> Tensor | None:
        """Return the loss of one microbatch's output; None only where a model that has its own was only evaluated."""
        if target is _NOTHING:
            # A mean over nothing is NaN, and its gradient too: a microbatch without weight adds zeros instead.
            made = [one for one in pack(output)[0] if one.requires_grad and not (self.own and one.dim() == 0)]
            return sum(((one.float() * 0.0).nan_to_num().sum() for one in made), torch.zeros(()))
        if self.own:
            return own_loss(output, needed=self._trains)
        assert self.loss_fn is not None
        loss = self.loss_fn(output, target)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            what = f"a tensor of the shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ModelError(f"loss_fn returned {what}", expected="a tensor without dimensions: the microbatch's mean")
        return loss


def _plain(weight: float | Tensor) -> float | Tensor:
    """Return a weight as a number, unless reading it would mean waiting for a device."""
    if not isinstance(weight, int | float | Tensor) or (isinstance(weight, Tensor) and weight.numel() != 1):
        what = f"a tensor of the shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise BatchError(f"loss_weight returned {what}", expected="a number: what the microbatch counts")
    return float(weight) if isinstance(weight, Tensor) and weight.device.type == "cpu" else weight
