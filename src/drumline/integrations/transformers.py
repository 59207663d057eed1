"""The `Trainer` of transformers on a pipeline: replace its import, and pass `pipeline=`.

Only the step is ours: the trainer calls `training_step` for every microbatch of an update, and the last of these calls
runs them all. Data, optimizer, learning rate, clipping, logs, callbacks, metrics and files stay the trainer's.
Checkpoints are those that it writes in one process, so that they resume on any number of ranks, or on none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from drumline.core.errors import refuse
from drumline.integrations.refused import DECIDED, check, check_version
from drumline.integrations.replica import begin, declare, seen_as
from drumline.model.patches import put_in
from drumline.pipeline.calls.ahead import Ahead
from drumline.pipeline.calls.function_steps import FunctionSteps
from drumline.pipeline.calls.functions import StandIn
from drumline.pipeline.passed_on import settings_for
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.whole import load_whole_state, need_folder, refresh, whole_state
from drumline.report.summary import idle_shares


class Trainer(transformers.Trainer):
    """`transformers.Trainer`, whose steps run on a pipeline; `pipeline` has the settings of `dl.Pipeline`.

    A class derived from transformers' goes behind this one: `class Mine(Trainer, Theirs)`. Microbatches are the
    trainer's: `per_device_train_batch_size` rows each, and `gradient_accumulation_steps` of them. Start the script by
    torchrun, or its function by `dl.launch`: each process is a rank. Here two take turns in one.

    >>> from tempfile import mkdtemp
    >>> sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    >>> model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=2, **sizes))
    >>> args = transformers.TrainingArguments(
    ...     mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=2, logging_steps=1,
    ...     save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
    ... )
    >>> rows = [{"input_ids": [3, 4, 5, 6], "labels": [3, 4, 5, 6]} for _ in range(8)]
    >>> trainer = Trainer(model, args, train_dataset=rows, pipeline={"schedule": "zb-h1", "num_ranks": 2})
    >>> trainer.remove_callback(transformers.PrinterCallback)
    >>> trainer.train().global_step
    2
    >>> [name for name in trainer.state.log_history[0] if "pipeline" in name][0]
    'pipeline_bubble'
    """

    optimizer: Any
    steps_kind: type[FunctionSteps] = FunctionSteps

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **named: Any) -> None:
        check_version()
        self._settings = settings_for(named.get("model", args[0] if args else None), pipeline, DECIDED)
        self._inputs: list[Any] = []  # of the microbatches of an update, until its last one comes
        self._losses: list[Tensor] = []  # of which the trainer asks the gradients: the pipeline computes these
        self._operations: dict[Any, Any] = {}  # by the shapes of a microbatch
        self._ahead = Ahead((), 1)
        super().__init__(*args, **named)
        others = self._settings.keys() & {"adapt", "master_weights", "zero"}
        refuse((
            self.optimizer is not None and others, "optimizers= is given, and the pipeline updates other tensors",
            "an optimizer that the pipeline makes", "pass optimizer_cls_and_kwargs= or set optim",
        ))  # fmt: skip

    @cached_property
    def steps(self) -> FunctionSteps:
        """The pipeline's steps; made when they are first needed, from the model as it is then."""
        args = self.args
        settings = {"seed": args.seed, "device": args.device, "num_microbatches": args.gradient_accumulation_steps}
        settings |= {"checkpoint": "full"} if args.gradient_checkpointing else {}
        precision = "bf16" if args.mixed_precision == "bf16" else "fp32"
        return self.steps_kind(self.model, **{**settings, **self._settings}, precision=precision)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline of the model."""
        return self.steps.pipe

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which takes the pipeline for one replica, and leaves gradients to it."""
        check(self, self._settings, is_fitted=self.steps_kind is not FunctionSteps)
        self.args.accelerator_config.dispatch_batches = False  # every rank reads the data itself
        begin(self.args)
        super().create_accelerator_and_postprocess()
        # A trainer that is dropped ends at once, and so do processes that load its data.
        accelerator, trainer = self.accelerator, weakref.proxy(self)
        accelerator.clip_grad_norm_ = lambda _, *norms: trainer.pipeline.clip_grad_norm_(*norms)
        accelerator.backward = lambda loss, **_: trainer._losses.append(loss)
        accelerator.gather = lambda value: trainer.steps.over_lines(value) if trainer.args.world_size > 1 else value
        accelerator.prepare_model = accelerator.prepare_optimizer = lambda prepared, *_, **__: prepared

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the pipeline moves this rank's stages."""

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> Any:
        attributes = {"parameters": self.model.parameters, "zero_grad": self.pipeline.zero_grad}
        return StandIn(self.model, None, "the trainer", attributes)

    def _get_dataloader(self, dataset: Any, *args: Any, is_training: bool = False, **named: Any) -> Any:
        """Give all ranks of a line the same data: a replica's share of it in training, all of it in evaluations."""
        if self.args.gradient_checkpointing and hasattr(self.model, "gradient_checkpointing_disable"):
            self.model.gradient_checkpointing_disable()  # the pipeline recomputes blocks itself
        declare(self.pipeline.axes.rows[1])
        number, count = self.pipeline.axes.rows if is_training else (0, 1)
        with seen_as(num_processes=count, process_index=number):
            return super()._get_dataloader(dataset, *args, is_training=is_training, **named)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take a microbatch; with the last one of an update, run all of them, and return their loss."""
        self._inputs.append(inputs)
        if not self.accelerator.sync_gradients:
            return torch.zeros((), device=self.args.device)
        batches, self._inputs = self._inputs[-self.current_gradient_accumulation_steps :], []
        self.callback_handler.model = StandIn(self.model, None, "a callback")

        def loss_of(model: Any, inputs: Any) -> Tensor:
            super(Trainer, self).training_step(model, inputs, num_items_in_batch)
            return self._losses.pop()

        loss: Tensor = self._run(self.steps.train, loss_of, batches)
        return loss.to(self.args.device, torch.float32)

    def _run(self, run: Callable[..., Any], function: Callable[[Any, Any], Any], batches: list[Any]) -> Any:
        """Run one step of these batches."""
        return run(function, batches, step=self.state.global_step, holder=self)

    def evaluation_loop(self, dataloader: Any, *args: Any, **named: Any) -> Any:
        """Evaluate several batches at once; the rank with the last stage computes the metrics, and tells all."""
        self._ahead = Ahead(dataloader, self.args.gradient_accumulation_steps)
        with seen_as(num_processes=1):  # every line evaluates all data
            outcome = super().evaluation_loop(self._ahead, *args, **named)
        return self.steps.from_last(outcome)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
        """Return what was computed for a batch, with those that were read ahead; nothing without the last stage."""

        def function(model: Any, inputs: Any) -> Any:
            return super(Trainer, self).prediction_step(model, inputs, *args, **named)

        return self._ahead.outcome_of(inputs, partial(self._run, self.steps.evaluate, function)) or (None, None, None)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a step's log how long ranks were idle, and why, as shares of the step."""
        inside = "steps" in vars(self) and self.steps.number is not None
        refuse((inside, "compute_loss calls log()", "logs of all ranks: only one computes it", "log in a callback"))
        if "loss" in logs and self._settings.get("record", True):
            logs.update(idle_shares(self.pipeline.timeline(), "pipeline_"))
        super().log(logs, start_time)

    def floating_point_ops(self, inputs: Any) -> Any:
        """Count as transformers does, which goes through all modules, once for every shape instead of every time."""
        count = super().floating_point_ops
        shapes = tuple((name, value.shape) for name, value in inputs.items() if isinstance(value, Tensor))
        if count.__func__ is not transformers.Trainer.floating_point_ops or shapes not in self._operations:
            self._operations[shapes] = count(inputs)
        return self._operations[shapes]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer that the arguments name, over this rank's parameters."""
        if self.optimizer is None:
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            whole = settings.keys() & {"params", "model", "optimizer_dict"} or "bitsandbytes" in kind.__module__
            refuse((
                whole or torch.optim.Optimizer not in getattr(kind, "__mro__", ()),
                f"optim is {self.args.optim!s:.60}, which looks at the whole model",
                "an optimizer that updates each parameter by itself", 'set optim="adamw_torch", or pass optimizers=',
            ))  # fmt: skip
            trained = self.pipeline.parameter_shapes()
            decayed = [name for name in self.get_decay_parameter_names(self.model) if name in trained]
            groups = [{"names": decayed, "weight_decay": self.args.weight_decay}, {"weight_decay": 0.0}]
            self.optimizer = self.pipeline.optimizer(kind, groups=groups, **settings)
        return self.optimizer

    def train(self, *args: Any, **named: Any) -> Any:
        """Train; afterwards the model has all trained weights on every rank."""
        try:
            result = super().train(*args, **named)
        finally:
            self.callback_handler.model = self.model
        refresh(self.pipeline, self.model)
        return result

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what all ranks have trained; one rank writes, and the others wait for it."""
        refresh(self.pipeline, self.model)
        super().save_model(output_dir, _internal_call)
        self.pipeline.gather("saved")

    def _load_best_model(self) -> None:
        need_folder(self.pipeline, self.state.best_model_checkpoint)
        super()._load_best_model()
        self.pipeline.load_state_dict(self.model.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = whole_state(self.pipeline, self.model, self.optimizer, is_wanted=self.args.should_save)
        with put_in([(self.__dict__, "optimizer", SimpleNamespace(state_dict=lambda: state))]):
            super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.pipeline.load_state_dict(self.model.state_dict())  # which the trainer has loaded before
        load = partial(load_whole_state, self.pipeline, self.model, self.optimizer)
        with put_in([(self.__dict__, "optimizer", SimpleNamespace(load_state_dict=load))]):
            super()._load_optimizer_and_scheduler(checkpoint)
        self.pipeline.count_from(self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states: those of all ranks of a line are equal."""
        if self.args.world_size > 1 or self.args.process_index == 0:
            super()._save_rng_state(output_dir)
