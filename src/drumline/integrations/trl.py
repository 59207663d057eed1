"""The `SFTTrainer` of TRL on a pipeline: replace its import, and pass `pipeline=`.

TRL's trainer gives the model a head that returns the labels' log-probabilities instead of logits. In a pipeline the last
stage returns the model's own logits, and the same numbers are computed from these.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import trl
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from drumline.core.errors import UsageError
from drumline.integrations.trainer import PipelineTrainer

_FUSED, _LABELS = "fused_lm_head", ("labels", "shift_labels")


class SFTTrainer(PipelineTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer`, whose steps run on a pipeline; `pipeline` has the settings of `dl.Pipeline`."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if vars(base).pop("forward", None) is None or not hasattr(self, "_metrics"):
            raise UsageError(f"trl {trl.__version__} makes its loss in another way", expected="a version like trl 1.16")
        if self.aux_loss_enabled:
            raise UsageError(
                "router_aux_loss_coef is set, on a pipeline",
                expected="0.0: the loss of experts' balance is not computed from logits",
                fix="set router_aux_loss_coef=0.0",
            )
        self._noted: dict[int, Any] = {}  # by microbatch, what compute_loss adds to the metrics

    def _asked(self, call: Any) -> Any:
        """Ask the pipeline's model for logits where the head would return log-probabilities."""
        args, named = call
        if not named.pop(_FUSED, False):
            return args, named
        return args, {name: value for name, value in named.items() if name not in _LABELS}

    def _answered(self, output: Any, named: dict[str, Any]) -> Any:
        """Return what the head would return."""
        return fused(output.logits, **named) if named.get(_FUSED) else output

    def _answer(self, output: Any, number: int) -> Any:
        """Note what `compute_loss` adds to the metrics, once for a microbatch."""
        before = self._metrics, self._total_train_tokens
        self._metrics, self._total_train_tokens = {"train": defaultdict(list), "eval": defaultdict(list)}, 0
        try:
            loss = super()._answer(output, number)
            self._noted[number] = self._metrics, self._total_train_tokens
        finally:
            self._metrics, self._total_train_tokens = before
        return loss

    def _run(self, *args: Any) -> Any:
        """Add to the metrics what the last stage has noted, in the order of the microbatches."""
        self._noted.clear()
        result = super()._run(*args)
        for number, (metrics, num_tokens) in sorted(self._noted.items()):
            if number < self._num_real and self._has_loss:
                self._total_train_tokens += num_tokens
                for mode, lists in metrics.items():
                    for name, values in lists.items():
                        self._metrics[mode][name] += values
                    if lists:
                        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics of the rank that computes them, on every rank."""
        told = self.pipeline.gather((self._metrics, self._total_train_tokens) if self._has_loss else None)
        self._metrics, self._total_train_tokens = next(each for each in told if each is not None)
        super().log(logs, start_time)


def fused(
    logits: Tensor, labels: Tensor | None = None, shift_labels: Tensor | None = None, **_: Any
) -> FusedCausalLMOutput:
    """Return log-probabilities of the labels, and what TRL's metrics need, from logits."""
    targets = labels[:, 1:] if shift_labels is None else shift_labels
    scores = (logits[:, :-1] if shift_labels is None else logits).float()
    mask = targets != -100
    chances = scores.log_softmax(-1)
    chosen = targets.clamp(min=0)
    log_probs = chances.gather(-1, chosen[..., None])[..., 0].masked_fill(~mask, 0.0)
    with torch.no_grad():
        entropy = -(chances.exp() * chances).sum(-1).masked_fill(~mask, 0.0)
        is_top1 = (scores.argmax(-1) == chosen) & mask
    return FusedCausalLMOutput(log_probs=log_probs, entropy=entropy, is_top1=is_top1.float(), label_mask=mask)
