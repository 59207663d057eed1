"""The trainers of TRL on a pipeline: replace the import of `SFTTrainer` or `DPOTrainer`, and pass `pipeline=`.

TRL gives the model a head that returns the labels' log-probabilities instead of logits. In a pipeline the last stage
returns the model's own logits, and the same numbers are computed from these.
"""

from __future__ import annotations

import inspect
import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import trl
from trl.trainer.utils import FusedCausalLMOutput

from drumline.core.errors import refuse
from drumline.integrations.transformers import Trainer
from drumline.model.loss.label_scores import label_scores
from drumline.model.patches import put_in
from drumline.model.weights.adapters import base_model, without_adapters
from drumline.pipeline.calls.function_steps import FunctionSteps
from drumline.pipeline.calls.functions import Call, StandIn

_FUSED, _LABELS = "fused_lm_head", ("labels", "shift_labels")


class _FusedSteps(FunctionSteps):
    """Steps whose functions ask for log-probabilities, which are computed from the pipeline's logits."""

    differing = (_FUSED, *_LABELS)
    wanted: tuple[str, ...] = ()  # what else TRL's head would return
    reference: FunctionSteps | None = None  # which runs on the same rows, before each step
    scores: list[Any]  # of the reference, by microbatch

    def asked(self, calls: list[Call]) -> list[Call]:
        """Ask the pipeline's model for logits where the head would return log-probabilities."""
        if self.reference is not None:
            scores = self.reference.evaluate(lambda model, call: model(*call[0], **call[1]), calls)
            self.scores = self.reference.from_last(scores)  # a step that is checked makes the loss on every rank
        fused = [self.differing if named.get(_FUSED) else (_FUSED,) for _, named in calls]
        arguments = zip(calls, fused, strict=True)
        return [(args, {name: named[name] for name in named if name not in out}) for (args, named), out in arguments]

    def answered(self, output: Any, named: dict[str, Any]) -> Any:
        """Return what the head would return."""
        if not named.get(_FUSED):
            return output
        labels, shift_labels = map(named.get, _LABELS)
        return FusedCausalLMOutput(**label_scores(output.logits, labels, shift_labels, reported=self.wanted))


class _FusedTrainer(Trainer):
    """What trainers have in common that ask the model for log-probabilities, and note metrics in `compute_loss`."""

    steps_kind: Any = _FusedSteps
    _metrics: Any
    _total_train_tokens: Any
    ref_model: Any

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.steps_kind = type("FusedSteps", (_FusedSteps,), {"wanted": plain_head(self.model)})
        refuse(
            (self._is_vlm, "the processing class is for images as well, on a pipeline",
             "a tokenizer, and a model of texts", "pass processing_class=processor.tokenizer, if no row has images"),
            (self.aux_loss_enabled, "router_aux_loss_coef is set, on a pipeline",
             "0.0: the loss of experts' balance is not computed from logits", "set router_aux_loss_coef=0.0"),
        )  # fmt: skip

    def _run(self, run: Callable[..., Any], function: Callable[[Any, Any], Any], batches: list[Any]) -> Any:
        """Add to the metrics what the last stage notes, in the order of the microbatches."""
        noted: dict[int | None, Any] = {}

        def noting(model: Any, inputs: Any) -> Any:
            metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}
            with put_in([(self.__dict__, "_metrics", metrics), (self.__dict__, "_total_train_tokens", 0)]):
                result = function(model, inputs)
                noted[self.steps.number] = metrics, self._total_train_tokens
            return result

        over_lines = [(self.accelerator.__dict__, "gather_for_metrics", self.accelerator.gather)]
        with put_in(over_lines if self.args.world_size > 1 else ()):
            result = super()._run(run, noting, batches)
        for _, (metrics, num_tokens) in sorted(noted.items()) if self.steps.has_loss else ():
            self._total_train_tokens += num_tokens
            for mode, lists in metrics.items():
                for name, values in lists.items():
                    self._metrics[mode][name] += values
                if lists:
                    self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        return result

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the metrics of the rank that computes them, on every rank."""
        if self.steps.number is None:  # else it is refused
            self._metrics, self._total_train_tokens = self.steps.from_last((self._metrics, self._total_train_tokens))
        super().log(logs, start_time)


class SFTTrainer(_FusedTrainer, trl.SFTTrainer):
    """`trl.SFTTrainer`, whose steps run on a pipeline; `pipeline` has the settings of `dl.Pipeline`."""


class DPOTrainer(_FusedTrainer, trl.DPOTrainer):
    """`trl.DPOTrainer`, whose steps run on a pipeline, and before each the forwards of the reference.

    The reference is the model without its adapters, or a model of its own. Either becomes a second pipeline.
    """

    @cached_property
    def steps(self) -> Any:
        """The steps of the model, with those of the reference."""
        steps: Any = super().steps
        model, trainer = self.ref_model, weakref.proxy(self)
        self.ref_model = StandIn(self.model, lambda **_: trainer.steps.scores[trainer.steps.number])
        if model is None:
            self._switched = ExitStack()  # adapters that the reference does without
            model = without_adapters(self.model, self._switched)
        else:
            plain_head(model.requires_grad_(requires_grad=False))
        steps.reference = steps.beside(model)
        steps.reference.wanted = ()
        return steps


def plain_head(model: Any) -> tuple[str, ...]:
    """Give a model its own forward back; return what TRL's would have returned."""
    base: Any = base_model(model)
    head = inspect.getclosurevars(vars(base).pop("forward", type(base).forward)).nonlocals
    moved = "outputs" not in head or head.get("temperature") != 1.0 or head.get("cast_lm_head_to_fp32")
    replaced = getattr(head.get("original_forward"), "__func__", None) is not type(base).forward
    refuse(
        (moved, f"trl {trl.__version__} makes its loss in another way", "a version like trl 1.16", "install that"),
        (replaced, f"the forward of {type(base).__name__} is replaced in the model", "the forward of its class",
         "load the model without device_map, or override forward in a class"),
    )  # fmt: skip
    return tuple(head["outputs"])
