"""The trainers of TRL on a pipeline: replace the import of `SFTTrainer` or `DPOTrainer`, and pass `pipeline=`.

TRL gives the model a head that returns the labels' log-probabilities instead of logits. In a pipeline the last stage
returns the model's own logits, and the same numbers are computed from these.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import trl
from torch import Tensor, nn
from trl.trainer.utils import FusedCausalLMOutput, use_adapter

from drumline.core.errors import ModelError
from drumline.integrations.refused import refuse
from drumline.integrations.trainer import PipelineTrainer
from drumline.model.microbatches import Microbatches
from drumline.pipeline.calls.functions import StandIn
from drumline.pipeline.pipeline import Pipeline

# Settings that a pipeline has no use for which only evaluates.
_OF_TRAINING = ("adapt", "continue_record", "master_weights", "programs", "zero")
_FUSED, _LABELS = "fused_lm_head", ("labels", "shift_labels")


class _LogProbabilities(PipelineTrainer):
    """What trainers have in common that ask the model for log-probabilities, and note metrics in `compute_loss`."""

    _calls_once = False
    _metrics: dict[str, Any]  # of the trainer
    _total_train_tokens: float
    _rows: dict[str, int]  # the arguments of a microbatch's calls, by identity

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._wanted = plain_head(self.model)
        refuse(
            (self._is_vlm, "the processing class is for images as well, on a pipeline",
             "a tokenizer, and a model of texts", "pass processing_class=processor.tokenizer, if no row has images"),
            (self.aux_loss_enabled, "router_aux_loss_coef is set, on a pipeline",
             "0.0: the loss of experts' balance is not computed from logits", "set router_aux_loss_coef=0.0"),
        )  # fmt: skip
        self._rows: dict[str, int] = {}  # what compute_loss has called the model with
        self._noted: dict[int, Any] = {}  # by microbatch, what compute_loss adds to the metrics

    def _asked(self, call: Any) -> Any:
        """Ask the pipeline's model for logits where the head would return log-probabilities."""
        args, named = call
        if not named.pop(_FUSED, False):
            return args, named
        return args, {name: value for name, value in named.items() if name not in _LABELS}

    def _answered(self, output: Any, named: dict[str, Any]) -> Any:
        """Return what the head would return; a second call asks for the logits of the same rows."""
        rows = {name: id(value) for name, value in named.items() if name != _FUSED and name not in _LABELS}
        self._rows = self._rows or rows
        if rows != self._rows:
            raise ModelError(
                "compute_loss calls the model a second time with other arguments",
                expected="one call, or several with the same arguments",
                fix="compute all that the loss needs in one call",
            )
        return fused(output.logits, self._wanted, **named) if named.get(_FUSED) else output

    def _answer(self, output: Any, number: int) -> Any:
        """Note what `compute_loss` adds to the metrics, once for a microbatch."""
        before = self._metrics, self._total_train_tokens
        self._metrics, self._total_train_tokens = {"train": defaultdict(list), "eval": defaultdict(list)}, 0
        self._rows = {}
        try:
            with self._over_lines():
                loss = super()._answer(output, number)
            self._noted[number] = self._metrics, self._total_train_tokens
        finally:
            self._metrics, self._total_train_tokens = before
        return loss

    @contextmanager
    def _over_lines(self) -> Iterator[None]:
        """Let metrics count the rows of all lines, each of which trains on others."""
        axes, accelerator = self.pipeline.axes, self.accelerator
        if axes.rows[1] == 1 or not self.model.training:
            yield
            return

        def gathered(tensor: Tensor) -> Tensor:
            return torch.cat(axes.gathered(tensor.reshape(-1), "dp"))

        accelerator.gather = accelerator.gather_for_metrics = gathered
        try:
            yield
        finally:
            del accelerator.gather, accelerator.gather_for_metrics

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
        answers = self.pipeline.gather((self._metrics, self._total_train_tokens) if self._has_loss else None)
        self._metrics, self._total_train_tokens = next(each for each in answers if each is not None)
        super().log(logs, start_time)


class SFTTrainer(_LogProbabilities, trl.SFTTrainer):
    """`trl.SFTTrainer`, whose steps run on a pipeline; `pipeline` has the settings of `dl.Pipeline`."""


class DPOTrainer(_LogProbabilities, trl.DPOTrainer):
    """`trl.DPOTrainer`, whose steps run on a pipeline, and before each the forwards of the reference.

    The reference is the model without its adapters, or a model of its own. Either becomes a second pipeline.
    """

    ref_model: Any  # of the trainer

    def __init__(self, *args: Any, **named: Any) -> None:
        self._references: dict[int, FusedCausalLMOutput] = {}  # by microbatch, at the last stage
        self._labels: Any = None  # of all microbatches, while the reference runs
        self._reference_pipe: Pipeline | None = None
        self._switched = ExitStack()  # adapters that the reference does without
        super().__init__(*args, **named)
        stays = "a reference that stays as it is"
        refuse((self.args.sync_ref_model, "sync_ref_model is True, on a pipeline", stays, "set sync_ref_model=False"))
        if self.ref_model is not None:
            plain_head(self.ref_model)

    def _precompute_ref_logps(self, *args: Any, **named: Any) -> Any:
        every = "False: every step runs the reference on its own rows"
        refuse((True, "precompute_ref_log_probs is True, on a pipeline", every, "leave it out"))

    def create_accelerator_and_postprocess(self) -> None:
        """Make an accelerator that leaves the reference as it is: its pipeline moves this rank's stages."""
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = _prepared

    def _asked(self, call: Any) -> Any:
        """Run the reference on the same rows."""
        labels = call[1]["labels"]
        args, named = super()._asked(call)
        self._references, self._labels = {}, labels
        try:
            self._reference().eval_step(*args, target=Microbatches(range(len(labels))), outputs=False, **named)
        finally:
            self._labels = None
        # A step that is checked makes the loss on every rank.
        line = self.pipeline.axes.rows[0]
        answers = self.pipeline.gather((line, self._references) if self._has_loss else None)
        self._references = next(each[1] for each in answers if each is not None and each[0] == line)
        return args, named

    def _reference(self) -> Pipeline:
        if self._reference_pipe is None:
            model: Any = self.ref_model
            if model is None:
                model = without_adapters(self.model, self._switched)
            else:
                model.requires_grad_(requires_grad=False)
            settings = {name: value for name, value in self._settings.items() if name not in _OF_TRAINING}
            self._reference_pipe = self._pipe_of(model, {**settings, "record": False})
        return self._reference_pipe

    def _answer(self, output: Any, number: int) -> Any:
        """Keep the reference's log-probabilities, or return the loss that is made with them."""
        if self._labels is not None:
            with torch.no_grad():
                self._references[number] = fused(output.logits, ("log_probs",), self._labels[number])
            return torch.zeros((), device=output.logits.device)
        reference, self.ref_model = self.ref_model, StandIn(self.model, lambda **_: self._references[number])
        try:
            return super()._answer(output, number)
        finally:
            self.ref_model = reference


def _prepared(model: Any, *_: Any, **__: Any) -> Any:
    """Return a model as it is."""
    return model


def without_adapters(model: Any, switched: ExitStack) -> Any:
    """Return a model that shares all tensors with this one, and does without its adapters, or has those of "ref"."""
    tensors = [*model.parameters(), *model.buffers()]
    trained = [tensor.requires_grad for tensor in tensors]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    switched.enter_context(use_adapter(twin, "ref" if "ref" in twin.peft_config else None))
    for tensor, trains in zip(tensors, trained, strict=True):  # switching adapters decides that as well
        tensor.requires_grad_(trains)
    return twin


def plain_head(model: Any) -> tuple[str, ...]:
    """Give a model its own forward back; return what TRL's would have returned."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = inspect.getclosurevars(vars(base).pop("forward", type(base).forward)).nonlocals
    moved = "outputs" not in head or head.get("temperature") != 1.0 or head.get("cast_lm_head_to_fp32")
    replaced = getattr(head.get("original_forward"), "__func__", None) is not type(base).forward
    refuse(
        (moved, f"trl {trl.__version__} makes its loss in another way", "a version like trl 1.16", "install that"),
        (replaced, f"the forward of {type(base).__name__} is replaced in the model", "the forward of its class",
         "load the model without device_map, or override forward in a class"),
    )  # fmt: skip
    return tuple(head["outputs"])


def fused(
    logits: Tensor,
    wanted: tuple[str, ...],
    labels: Tensor | None = None,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> FusedCausalLMOutput:
    """Return log-probabilities of the labels, and what TRL's metrics need, from logits."""
    targets = labels if shift_labels is None else shift_labels
    assert targets is not None
    # Rows that a prompt adds in front have no labels.
    targets = nn.functional.pad(targets, (logits.shape[1] - targets.shape[1], 0), value=-100)
    scores = logits.float()
    if shift_labels is None:
        targets, scores = targets[:, 1:], scores[:, :-1]
    mask = targets != -100
    chosen = targets.clamp(min=0)
    chances = scores.log_softmax(-1)
    values = {"log_probs": chances.gather(-1, chosen[..., None])[..., 0]}
    with torch.no_grad():
        metrics = {
            "entropy": lambda: -(chances.exp() * chances).sum(-1),
            "log_sum_sq_probs": lambda: (2 * chances).logsumexp(-1),
            "mean_logits": lambda: scores.mean(-1),
            "is_top1": lambda: scores.argmax(-1) == chosen,
        }
        values |= {name: metrics[name]() for name in wanted if name in metrics}
    return FusedCausalLMOutput(label_mask=mask, **{name: value.masked_fill(~mask, 0) for name, value in values.items()})
