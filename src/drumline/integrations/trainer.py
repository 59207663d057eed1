"""`PipelineTrainer`: what turns a `transformers.Trainer`, or a trainer derived from it, into one on a pipeline.

    the trainer's own        data, optimizer, schedule of the learning rate, clipping, logs, callbacks, metrics, files
    here                     the step: all microbatches of an update go through the pipeline at once

The trainer calls `training_step` for every microbatch of an update. The last of these calls runs the step.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import UsageError
from drumline.integrations.calls import StandIn, answered, call_of, full_precision, microbatches
from drumline.integrations.refused import check, check_version
from drumline.integrations.replica import one_replica, seen_as, set_lines
from drumline.integrations.states import optimizer_state, own_state, refresh
from drumline.model.microbatches import Microbatches
from drumline.pipeline.pipeline import Pipeline


class PipelineTrainer:
    """A mixin that goes before a trainer's class: `class MyTrainer(PipelineTrainer, TheirTrainer)`.

    `pipeline` has the settings of `dl.Pipeline`, such as `{"schedule": "zb-h1", "num_ranks": 2}`. Microbatches are the
    trainer's: `per_device_train_batch_size` rows each, and `gradient_accumulation_steps` of them.
    """

    _calls_once = True  # whether compute_loss calls the model once for each microbatch

    def __init__(self, *args: Any, pipeline: Mapping[str, Any] | None = None, **named: Any) -> None:
        check_version()
        self._settings = dict(pipeline or {})
        self._pipe: Pipeline | None = None
        self._inputs: list[Any] = []  # of the microbatches of an update, until its last one comes
        self._num_batches, self._num_real = 1, 1
        self._finish: Callable[[Any, Any], Any] = lambda output, inputs: None
        self._predicted: deque[Any] = deque()
        self._named_optimizer: Any = None
        super().__init__(*args, **named)
        check(self, self._settings)

    # ---- the pipeline ------------------------------------------------------------------------------------------------

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline; made when it is first needed, from the model as it is then."""
        if self._pipe is None:
            self._pipe = self._made(self.model)
            set_lines(self._pipe.axes.rows[1])
        return self._pipe

    def _made(self, model: nn.Module) -> Pipeline:
        args = self.args
        made_by_arguments = {
            "num_microbatches": args.gradient_accumulation_steps,
            "precision": "bf16" if args.bf16 else "fp32",
            "loss_fn": _Loss(self),
            "loss_weight": _Weight(self),
        }
        chosen = {"seed": args.seed, "device": args.device, **self._settings}
        if args.gradient_checkpointing:
            chosen.setdefault("checkpoint", "full")
        if any(param.is_meta for param in model.parameters()):
            raise UsageError(
                "the model is on the meta device", expected="a model with memory: the trainer saves it as a whole"
            )
        pipe = Pipeline(model, **chosen, **made_by_arguments)
        if pipe.program.placement.name == "bidirectional":
            raise UsageError(
                f"the schedule {pipe.program.name} has two last stages", expected="one, whose outputs are evaluated"
            )
        return pipe

    @property
    def _has_loss(self) -> bool:
        """Whether this process has the last stage, and so the model's outputs and the loss."""
        pipe = self.pipeline
        last = pipe.program.placement.rank_of(pipe.program.num_stages - 1, 0)
        return pipe.transport == "in-process" or pipe.rank == last

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which takes the pipeline for one replica."""
        self.args.accelerator_config.dispatch_batches = False  # every rank reads the data itself
        one_replica(self.args)
        super().create_accelerator_and_postprocess()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the pipeline moves this rank's stages."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        return _Wrapped(self)

    def _get_dataloader(self, dataset: Any, *args: Any, **named: Any) -> Any:
        """Give all ranks of a line the same data: a replica's share of it in training, all of it in evaluations."""
        number, count = self.pipeline.axes.rows
        share = {"num_processes": count, "process_index": number}
        with seen_as(**(share if named.get("is_training") else {"num_processes": 1, "process_index": 0})):
            return super()._get_dataloader(dataset, *args, **named)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Note how many microbatches come."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._num_batches, self._inputs = len(batches), []
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        count = super()._get_num_items_in_batch(batch_samples, device)
        if isinstance(count, Tensor) and self.args.average_tokens_across_devices:
            return self.pipeline.axes.summed(count, "dp")
        return count

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Take a microbatch; with the last one of an update, run all of them, and return their loss."""
        self._inputs.append(inputs)
        if len(self._inputs) < self._num_batches:
            return torch.zeros((), device=self.args.device)
        batches, self._inputs = self._inputs, []
        self.model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()

        def loss_of(model: Any, inputs: Any) -> Tensor:
            with self.compute_loss_context_manager():
                return self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)

        scaled = self.loss_is_scaled_for_ga
        if scaled is None:
            by_model = self.model_accepts_loss_kwargs and num_items_in_batch is not None
            scaled = by_model or self.compute_loss_func is not None
        # The pipeline takes the mean over the microbatches; the trainer, the sum of what it divides by itself.
        factor = len(batches) if scaled else 1
        self._finish = lambda model, inputs: loss_of(model, inputs) * factor
        loss = self._run(self.pipeline.step, batches, loss_of).loss
        return loss.to(self.args.device, torch.float32)

    def _run(self, step: Callable[..., Any], batches: list[Any], asks: Callable[[Any, Any], Any]) -> Any:
        """Run microbatches through the pipeline; where there are too few, repeat one that then counts nothing."""
        self._num_real = len(batches)
        size = self.args.gradient_accumulation_steps
        self._running = [self._prepare_inputs(batch) for batch in batches]
        self._running += self._running[-1:] * (size - len(batches))
        calls = [call_of(self.model, lambda model, one=one: asks(model, _copied(one))) for one in self._running]
        args, named = self._asked(microbatches(calls))
        return step(*args, target=Microbatches(range(size)), **named)

    def _asked(self, call: Any) -> Any:
        """Return what the pipeline's model is called with, where a trainer asks for more than it can."""
        return call

    def _answer(self, output: Any, number: int) -> Any:
        """Return what becomes of a microbatch's output at the last stage."""
        inputs = _copied(self._running[number])
        if self.args.bf16:
            output = full_precision(output)
        answer = self._answered
        with torch.autocast(torch.device(self.pipeline.device).type, enabled=False):
            return answered(
                self.model,
                lambda named: answer(output, named),
                lambda model: self._finish(model, inputs),
                once=self._calls_once,
            )

    def _answered(self, output: Any, named: dict[str, Any]) -> Any:
        """Return what a call of the model with these arguments returns, from what the pipeline has computed."""
        return output

    # ---- evaluations -------------------------------------------------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Evaluate several batches at once; the rank with the last stage computes the metrics, and tells all."""
        only_loss = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        ahead = _Ahead(
            dataloader,
            self.args.gradient_accumulation_steps,
            lambda batches: self._predict(batches, only_loss, ignore_keys),
        )
        outcome = super().evaluation_loop(ahead, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        told = self.pipeline.gather(outcome if self._has_loss else None)
        return next(each for each in told if each is not None)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        """Return what was computed for a batch; nothing on ranks without the last stage."""
        if not self._predicted:
            self._predict([inputs], prediction_loss_only, ignore_keys)
        return self._predicted.popleft()

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
        self._finish = finish
        self._run(self.pipeline.eval_step, batches, asks)
        self._predicted.extend(answers if self._has_loss else [(None, None, None)] * len(batches))

    # ---- optimizers --------------------------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make the optimizer that the arguments name, over this rank's parameters."""
        if self.optimizer is None:
            kind, settings = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, self.model)
            if not isinstance(kind, type) or not issubclass(kind, torch.optim.Optimizer):
                kind = type(kind)
            if settings.keys() & {"params", "model", "optimizer_dict"} or "bitsandbytes" in kind.__module__:
                raise UsageError(
                    f"optim is {self.args.optim!s:.60}, which looks at the whole model",
                    expected="an optimizer that updates each parameter by itself",
                    fix='set optim="adamw_torch", or pass optimizers=',
                )
            optimizer = self.pipeline.optimizer(kind, **settings)
            names = {id(tensor): name for name, tensor in self.pipeline.named_master_weights()}
            decayed = set(self._groups()[0])
            (group,) = optimizer.param_groups
            parts: tuple[list[Any], list[Any]] = ([], [])
            for param in group["params"]:
                parts[names[id(param)] not in decayed].append(param)
            weights = (self.args.weight_decay, 0.0)
            optimizer.param_groups[:] = [
                {**group, "params": part, "weight_decay": weight} for part, weight in zip(parts, weights, strict=True)
            ]
            self.optimizer = self._named_optimizer = optimizer
        return self.optimizer

    def _groups(self) -> list[list[str]]:
        """Return the names of the parameters that decay, and of those that do not, of the whole model."""
        decay = set(self.get_decay_parameter_names(self.model))
        names = [name for name, param in self.model.named_parameters() if param.requires_grad]
        return [[name for name in names if name in decay], [name for name in names if name not in decay]]

    def _clip_grad_norm(self, model: Any) -> Tensor:
        return self.pipeline.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        return self.pipeline.clip_grad_norm_(torch.finfo(torch.float32).max) if grad_norm is None else grad_norm

    # ---- files -------------------------------------------------------------------------------------------------------

    def train(self, *args: Any, **named: Any) -> Any:
        """Train; afterwards the model has all trained weights on every rank."""
        result = super().train(*args, **named)
        refresh(self.pipeline, self.model)
        return result

    def _inner_training_loop(self, *args: Any, **named: Any) -> Any:
        if self.args.gradient_checkpointing and hasattr(self.model, "gradient_checkpointing_disable"):
            self.model.gradient_checkpointing_disable()  # the pipeline recomputes blocks itself
        return super()._inner_training_loop(*args, **named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what all ranks have trained; one rank writes, and the others wait for it."""
        refresh(self.pipeline, self.model)
        super().save_model(output_dir, _internal_call)
        self.pipeline.gather("saved")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._take_weights()

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._take_weights()

    def _take_weights(self) -> None:
        if self._pipe is not None:
            self._pipe.load_state_dict(self.model.state_dict())

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer
        state = optimizer_state(self.pipeline, optimizer.state_dict(), self._groups())
        self.optimizer = SimpleNamespace(state_dict=lambda: state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer = self.optimizer

        def load(state: Any) -> None:
            optimizer.load_state_dict(own_state(state, self._groups()) if self._named_optimizer else state)

        self.optimizer = SimpleNamespace(load_state_dict=load)
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.optimizer = optimizer
        self.pipeline.count_from(self.state.global_step)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states of every rank."""
        if self.args.process_index == 0:
            super()._save_rng_state(output_dir)  # what a run in one process reads
        with seen_as(num_processes=2):
            super()._save_rng_state(output_dir)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        with seen_as(num_processes=2):
            super()._load_rng_state(checkpoint)

    # ---- logs --------------------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to a step's log how long ranks were idle, and why, as shares of the step."""
        if "loss" in logs and self._settings.get("record", True):
            timeline = self.pipeline.timeline()
            whole = timeline.num_ranks * timeline.makespan
            logs["pipeline_bubble"] = timeline.bubble
            for idle in timeline.causes:
                name = f"pipeline_idle_{idle.cause.value}"
                logs[name] = logs.get(name, 0.0) + idle.seconds / whole
        super().log(logs, start_time)


class _Loss:
    """The pipeline's loss function; it keeps no trainer alive, and nobody who looks at it looks at all of that."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        self._trainer = weakref.ref(trainer)

    def __call__(self, output: Any, target: int) -> Tensor:
        return self._trainer()._answer(output, target)


class _Weight(_Loss):
    """How much a microbatch counts: nothing, if it repeats another one."""

    def __call__(self, target: int) -> float:
        return float(target < self._trainer()._num_real)


class _Wrapped(StandIn):
    """What the trainer takes for the wrapped model."""

    def __init__(self, trainer: PipelineTrainer) -> None:
        super().__init__(trainer.model, lambda *_, **__: None)
        self._trainer = trainer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def zero_grad(self) -> None:
        self._trainer.pipeline.zero_grad()


class _Ahead:
    """A loader of evaluation batches that runs a group of them before it yields them one by one."""

    def __init__(self, loader: Any, size: int, run: Callable[[list[Any]], None]) -> None:
        self._loader, self._size, self._run = loader, size, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        says_end = hasattr(self._loader, "end_of_dataloader")
        batches, ended = iter(self._loader), False
        while not ended:
            group: list[Any] = []
            while len(group) < self._size and not ended:
                group += [batch for batch in [next(batches, None)] if batch is not None]
                ended = self._loader.end_of_dataloader if says_end else len(group) < self._size
            if group:
                self._run(group)
            for at, batch in enumerate(group):
                if says_end:  # as it was when this batch was read
                    self._loader.end_of_dataloader = ended and at == len(group) - 1
                yield batch
        next(batches, None)


def _copied(inputs: Any) -> Any:
    """Return inputs that a function may add to and take from."""
    return type(inputs)(inputs) if isinstance(inputs, dict) else dict(inputs) if isinstance(inputs, Mapping) else inputs
