"""`PipelineTrainer`: what turns a `transformers.Trainer`, or a trainer derived from it, into one on a pipeline.

    the trainer's own        data, optimizer, schedule of the learning rate, clipping, logs, callbacks, metrics, files
    here                     the step: all microbatches of an update go through the pipeline at once

The trainer calls `training_step` for every microbatch of an update. The last of these calls runs the step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import transformers
from accelerate.utils import convert_to_fp32, recursively_apply
from torch import Tensor, nn

from drumline.integrations.ahead import Ahead
from drumline.integrations.checkpoints import TrainerFiles
from drumline.integrations.refused import (
    check,
    check_given,
    check_pipeline,
    check_short,
    check_version,
    refuse,
    updated_by,
)
from drumline.integrations.replica import begin, declare, seen_as
from drumline.model.microbatches import Microbatches
from drumline.pipeline.calls.draws import TwiceDrawn
from drumline.pipeline.calls.functions import Functions, StandIn, copied
from drumline.pipeline.pipeline import Pipeline


class PipelineTrainer(TrainerFiles):
    """A mixin that goes before a trainer's class: `class MyTrainer(PipelineTrainer, TheirTrainer)`.

    `pipeline` has the settings of `dl.Pipeline`, such as `{"schedule": "zb-h1", "num_ranks": 2}`. Microbatches are the
    trainer's: `per_device_train_batch_size` rows each, and `gradient_accumulation_steps` of them.

    >>> import transformers
    >>> class Seq2SeqTrainer(PipelineTrainer, transformers.Seq2SeqTrainer):
    ...     "Theirs, on a pipeline."
    """

    current_gradient_accumulation_steps: int  # of the trainer
    _finish: Callable[[Any, Any], Tensor]  # makes a microbatch's loss, while a step runs
    _calls_once = True  # whether compute_loss calls the model once for each microbatch

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **named: Any) -> None:
        check_version()
        check_given(named.get("model", args[0] if args else None), pipeline)
        self._settings = dict(pipeline or {})
        self._pipe: Pipeline | None = None
        self._inputs: list[Any] = []  # of the microbatches of an update, until its last one comes
        self._num_real = 1
        self._running: list[Any] = []  # the inputs of the step that runs
        self._predicted: deque[Any] = deque()
        self._operations: dict[Any, Any] = {}  # by the shapes of a microbatch
        self._answers = False  # whether compute_loss runs to its end, on this rank alone
        super().__init__(*args, **named)
        self._draws = TwiceDrawn(self.args.seed, torch.device(self.args.device))

    # ---- the pipeline ------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; made when it is first needed, from the model as it is then."""
        if self._pipe is None:
            self._pipe = self._pipe_of(self.model, self._settings)
        return self._pipe

    def _pipe_of(self, model: nn.Module, settings: Mapping[str, Any]) -> Pipeline:
        args = self.args
        updated = updated_by(self.optimizer)
        names = {name for name, param in model.named_parameters() if id(param) in updated}
        chosen = {"seed": args.seed, "device": args.device, **settings}
        if args.gradient_checkpointing:
            chosen.setdefault("checkpoint", "full")
        trainer: Any = weakref.ref(self)  # nobody who looks at the loss function looks at all of the trainer
        pipe = Pipeline(
            model,
            **chosen,
            num_microbatches=args.gradient_accumulation_steps,
            precision="bf16" if args.mixed_precision == "bf16" else "fp32",
            loss_fn=lambda output, target: trainer()._answer(output, target),
            loss_weight=lambda target: float(target < trainer()._num_real),  # one that is repeated counts nothing
        )
        if model is self.model:
            check_pipeline(self, pipe, names)
        declare(pipe.axes.rows[1])
        return pipe

    @property
    def _has_loss(self) -> bool:
        """Whether this process has the last stage, and so the model's outputs and the loss."""
        pipe = self.pipeline
        last = pipe.program.placement.rank_of(pipe.program.num_stages - 1, 0)
        return pipe.transport == "in-process" or pipe.rank == last

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which takes the pipeline for one replica."""
        check(self, self._settings)
        self.args.accelerator_config.dispatch_batches = False  # every rank reads the data itself
        begin(self.args)
        super().create_accelerator_and_postprocess()
        trainer = weakref.proxy(self)  # a trainer that is dropped ends at once, and so do processes that load its data
        self.accelerator.clip_grad_norm_ = lambda _, *norms: trainer.pipeline.clip_grad_norm_(*norms)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the pipeline moves this rank's stages."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return _Wrapped(self)

    def _get_dataloader(self, dataset: Any, *args: Any, **named: Any) -> Any:
        """Give all ranks of a line the same data: a replica's share of it in training, all of it in evaluations."""
        if self.args.gradient_checkpointing and hasattr(self.model, "gradient_checkpointing_disable"):
            self.model.gradient_checkpointing_disable()  # the pipeline recomputes blocks itself
        number, count = self.pipeline.axes.rows
        declare(count)
        share = {"num_processes": count, "process_index": number}
        with seen_as(**(share if named.get("is_training") else {"num_processes": 1, "process_index": 0})):
            return super()._get_dataloader(dataset, *args, **named)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Count the labels of all lines."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._inputs = []
        if isinstance(num_items, Tensor) and self.args.average_tokens_across_devices and self.args.world_size > 1:
            num_items = self.pipeline.axes.summed(num_items, "dp")
        return batches, num_items

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take a microbatch; with the last one of an update, run all of them, and return their loss."""
        self._inputs.append(inputs)
        if len(self._inputs) < self.current_gradient_accumulation_steps:
            return torch.zeros((), device=self.args.device)
        batches, self._inputs = self._inputs, []
        if len(batches) < self.args.gradient_accumulation_steps:
            check_short(self.model, len(batches), self.args.gradient_accumulation_steps)
        self.callback_handler.model = StandIn(self.model, _refused, "a callback")
        self.model.train()  # once for all microbatches
        losses: list[Tensor] = []  # of which the trainer asks the gradients: the pipeline computes these
        self.accelerator.backward = lambda loss, **_: losses.append(loss)

        def loss_of(model: Any, inputs: Any) -> Tensor:
            super(PipelineTrainer, self).training_step(model, inputs, num_items_in_batch)
            return losses.pop()

        # The pipeline takes the mean over the microbatches, and the trainer has divided each loss by their number.
        def finish(model: Any, inputs: Any) -> Tensor:
            return loss_of(model, inputs) * len(batches)

        loss: Tensor = self._run(self.pipeline.step, batches, loss_of, finish).loss
        return loss.to(self.args.device, torch.float32)

    def _run(
        self, step: Callable[..., Any], batches: list[Any], asks: Callable[[Any, Any], Any],
        finish: Callable[[Any, Any], Tensor],
    ) -> Any:  # fmt: skip
        """Run microbatches through the pipeline; where there are too few, repeat one that then counts nothing."""
        self._num_real = len(batches)
        size = self.args.gradient_accumulation_steps
        self._running = [self._prepare_inputs(batch) for batch in batches]
        self._functions = Functions(self.model)
        with self._functions.unchanged(self, self._running):
            calls = [
                self._functions.call_of(partial(_on_copy, asks, self._running[number]))
                for number in self._draws.noted(len(batches))
            ]
        missing = size - len(batches)
        self._running += self._running[-1:] * missing
        args, named = self._asked(self._functions.together(calls + calls[-1:] * missing))
        self._finish = finish
        try:
            return step(*args, target=Microbatches(range(size)), **named)
        finally:
            del self._finish

    def _asked(self, call: Any) -> Any:
        """Return what the pipeline's model is called with, where a trainer asks for more than it can."""
        return call

    def _answer(self, output: Any, number: int) -> Any:
        """Return what becomes of a microbatch's output at the last stage."""
        inputs, self._answers = copied(self._running[number]), True
        output = (
            convert_to_fp32(output) if self.args.mixed_precision == "bf16" else output
        )  # as accelerate does after autocast
        output = recursively_apply(Tensor.clone, output, test_type=_is_loss)
        answer = self._answered
        quiet = torch.autocast(torch.device(self.pipeline.device).type, enabled=False)
        try:
            with quiet, self._draws.again(min(number, self._num_real - 1), self.state.global_step):
                return self._functions.answered(
                    lambda named: answer(output, named),
                    lambda model: self._finish(model, inputs),
                    once=self._calls_once,
                )
        finally:
            self._answers = False

    def _answered(self, output: Any, named: dict[str, Any]) -> Any:
        """Return what a call of the model with these arguments returns, from what the pipeline has computed."""
        return output

    def floating_point_ops(self, inputs: Any) -> Any:
        """Count as transformers does, which goes through all modules, once for every shape instead of every time."""
        if getattr(super().floating_point_ops, "__func__", None) is not transformers.Trainer.floating_point_ops:
            return super().floating_point_ops(inputs)
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, Tensor))
        if shapes not in self._operations:
            self._operations[shapes] = super().floating_point_ops(inputs)
        return self._operations[shapes]

    # ---- evaluations -------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self, dataloader: Any, description: str, prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval",
    ) -> Any:  # fmt: skip
        """Evaluate several batches at once; the rank with the last stage computes the metrics, and tells all."""
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        trainer, size = weakref.proxy(self), self.args.gradient_accumulation_steps
        ahead = Ahead(dataloader, size, lambda batches: trainer._predict(batches, only_loss, ignore_keys))
        outcome = super().evaluation_loop(ahead, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        results = self.pipeline.gather((outcome, self._draws.states()) if self._has_loss else None)
        outcome, states = next(each for each in results if each is not None)
        self._draws.go_on(states)  # metrics may have drawn random numbers
        return outcome

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Return what was computed for a batch; nothing on ranks without the last stage."""
        if not self._predicted or self._predicted[0][0] is not inputs:  # other inputs than those that were read ahead
            self._predicted.clear()
            self._predict([inputs], prediction_loss_only, ignore_keys)
        return self._predicted.popleft()[1]

    def _predict(self, batches: list[Any], only_loss: bool, ignore_keys: list[str] | None) -> None:
        """Run evaluation batches as microbatches of one step."""
        answers: list[Any] = []

        def asks(model: Any, inputs: Any) -> Any:
            return super(PipelineTrainer, self).prediction_step(model, inputs, only_loss, ignore_keys)

        def finish(model: Any, inputs: Any) -> Tensor:
            if len(answers) < self._num_real:
                answers.append(asks(model, inputs))
            return torch.zeros((), device=self.args.device)

        self.model.eval()
        with seen_as(num_processes=1):  # every line evaluates all data
            self._run(self.pipeline.eval_step, batches, asks, finish)
        outcomes = answers if self._has_loss else [(None, None, None)] * len(batches)
        self._predicted = deque(zip(batches, outcomes, strict=True))

    # ---- logs --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a step's log how long ranks were idle, and why, as shares of the step."""
        alone = "logs that all ranks write: only one of them computes the loss"
        refuse((self._answers, "compute_loss calls log()", alone, "log in a callback"))
        if "loss" in logs and self._settings.get("record", True):
            timeline = self.pipeline.timeline()
            whole = timeline.num_ranks * timeline.makespan
            logs["pipeline_bubble"] = timeline.bubble
            for idle in timeline.causes:
                name = f"pipeline_idle_{idle.cause.value}"
                logs[name] = logs.get(name, 0.0) + idle.seconds / whole
        super().log(logs, start_time)


def _on_copy(asks: Callable[[Any, Any], Any], inputs: Any, model: Any) -> Any:
    return asks(model, copied(inputs))


def _is_loss(value: Any) -> bool:
    """Whether a value may be a loss, which trainers scale in place."""
    return isinstance(value, Tensor) and value.dim() == 0


class _Wrapped(StandIn):
    """What the trainer takes for the wrapped model."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        super().__init__(trainer.model, _refused, "the trainer")
        self._trainer = weakref.proxy(trainer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def zero_grad(self) -> None:
        self._trainer.pipeline.zero_grad()


def _refused(*_: Any, **__: Any) -> None:
    refuse((
        True, "the model is called outside of compute_loss, in training",
        "calls in compute_loss: other ranks hold parts of the model",
        "call trainer.evaluate or trainer.predict, or the model after train()",
    ))  # fmt: skip
