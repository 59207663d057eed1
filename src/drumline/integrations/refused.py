"""What a trainer on a pipeline refuses: arguments that mean another way of training, and libraries that have moved."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

import accelerate
import transformers
from torch import nn

from drumline.core.errors import UsageError
from drumline.pipeline.pipeline import Pipeline

# What the integration overrides or calls, and the parameters that it counts on.
_SEAM = {
    "create_accelerator_and_postprocess": (),
    "_get_dataloader": ("dataset", "is_training"),
    "_wrap_model": ("model", "training"),
    "_move_model_to_device": ("model", "device"),
    "create_optimizer": ("model",),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "evaluation_loop": ("dataloader", "prediction_loss_only", "ignore_keys"),
    "save_model": ("output_dir", "_internal_call"),
    "_load_best_model": (),
    "_save_optimizer_and_scheduler": ("output_dir",),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_save_rng_state": ("output_dir",),
    "_load_rng_state": ("checkpoint",),
    "log": ("logs", "start_time"),
}

# Arguments of TrainingArguments that are refused if they are set, and what to do instead.
_ARGUMENTS = {
    "deepspeed": "leave it out: the pipeline divides the model",
    "fsdp": "leave it out: the pipeline divides the model",
    "parallelism_config": 'leave it out, and pass pipeline={"mesh": ...} for several axes',
    "fp16": "set bf16=True",
    "fp16_full_eval": "leave it out",
    "bf16_full_eval": "leave it out",
    "torch_compile": 'leave it out, and pass pipeline={"compile": True}',
    "auto_find_batch_size": "set per_device_train_batch_size",
    "use_liger_kernel": "leave it out",
    "activation_offloading": "set gradient_checkpointing=True",
    "predict_with_generate": "leave it out, and generate from the saved model",
    "neftune_noise_alpha": "leave it out",
    "debug": "leave it out",
    "enable_jit_checkpoint": "leave it out: ranks would stop at different steps",
}
# Settings of Pipeline that the trainer's own arguments decide.
_SETTINGS = {
    "loss_fn": "the trainer's compute_loss",
    "loss_weight": "the trainer's compute_loss",
    "model": "the trainer's model",
    "num_microbatches": "gradient_accumulation_steps",
    "precision": "bf16=True",
}


def check_version(trainer: type = transformers.Trainer) -> None:
    """Refuse a version of transformers whose Trainer has no such seams any more."""
    for name, wanted in _SEAM.items():
        function = getattr(trainer, name, None)
        known = set(inspect.signature(function).parameters) if callable(function) else set()
        if function is None or not known.issuperset(wanted):
            raise UsageError(
                f"transformers {transformers.__version__} with accelerate {accelerate.__version__} has no "
                f"Trainer.{name}({', '.join(wanted)})",
                expected="versions that Drumline was tested with: transformers 5.17 to 5.22, accelerate 1.15",
                fix="install one of these, or a newer Drumline",
            )


def check_given(model: Any, settings: Any) -> None:
    """Refuse a model that something else has wrapped, and settings that are no dict."""
    if isinstance(model, Pipeline | nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(
        model, "_orig_mod"
    ):
        raise UsageError(
            f"the model is wrapped: a {type(model).__name__}",
            expected="the model itself",
            fix='pass the model, and pipeline={...} with settings such as "compile"',
        )
    if settings is not None and not isinstance(settings, Mapping):
        raise UsageError(
            f"pipeline is {settings!r:.60}",
            expected="a dict of settings of dl.Pipeline",
            fix='pass pipeline={"num_ranks": 2}, say, or leave it out',
        )


def check(trainer: Any, settings: dict[str, Any]) -> None:
    """Refuse arguments of the trainer, and settings of the pipeline, that do not go together."""
    for name, fix in _ARGUMENTS.items():
        if value := getattr(trainer.args, name, None):
            raise UsageError(f"{name} is {value!r:.60}, on a pipeline", expected="a run without it", fix=fix)
    by_trl = [cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]
    if by_trl and trainer._calls_once:
        raise UsageError(
            f"{by_trl[0]} is one of TRL's trainers, which ask more of a model",
            expected="SFTTrainer or DPOTrainer from drumline.integrations.trl, or a class derived from them",
            fix="train with these; others of TRL do not run on a pipeline",
        )
    if trainer.model is None:
        raise UsageError("model_init is given, on a pipeline", expected="a model", fix="pass model=")
    if any(param.is_meta for param in trainer.model.parameters()):
        raise UsageError(
            "the model is on the meta device", expected="a model with memory: the trainer saves it as a whole"
        )
    _check_adapt(settings.get("adapt"))
    if settings.get("zero") and trainer.args.save_strategy != "no" and not trainer.args.save_only_model:
        raise UsageError(
            "checkpoints would hold the optimizer's state, which zero divides over lines",
            expected="checkpoints of weights alone, or zero=0",
            fix='set save_only_model=True or save_strategy="no"',
        )
    known = set(inspect.signature(Pipeline).parameters)
    for name in settings.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        raise UsageError(
            f"pipeline has the setting {name!r}",
            expected="settings of dl.Pipeline",
            fix=f"write {near[0]!r}" if near else "leave it out",
        )
    for name, decides in _SETTINGS.items():
        if name in settings:
            raise UsageError(
                f"pipeline has the setting {name}", expected=f"none: {decides} decides it", fix="leave it out"
            )


def _check_adapt(adapt: Any) -> None:
    if isinstance(adapt, dict) and adapt.get("microbatches", "keep") != "keep":
        raise UsageError(
            f"adapt: microbatches is {adapt['microbatches']!r:.60}, on a trainer",
            expected='"keep": gradient_accumulation_steps decides it',
            fix="leave it out",
        )


def check_pipeline(trainer: Any, pipe: Pipeline, names: set[str]) -> None:
    """Refuse schedules that update or put out otherwise than the trainer, and an optimizer of other tensors."""
    program = pipe.program
    if program.num_updates or program.placement.name == "bidirectional":
        raise UsageError(
            f"the schedule {program.name} "
            + ("updates inside of a step" if program.num_updates else "has two last stages"),
            expected="a schedule with a flush and one last stage",
            fix="leave out the schedule, or choose another one",
        )
    if others := sorted(set(pipe.axes.names) - {"pp", "dp"}):
        raise UsageError(
            f"the mesh has the axis {others[0]}, on a trainer", expected="pp and dp alone", fix="use a loop of your own"
        )
    if trainer.args.include_num_input_tokens_seen != "no" and pipe.axes.rows[1] > 1:
        raise UsageError(
            "include_num_input_tokens_seen is set, with data-parallel lines", expected="one line", fix="leave it out"
        )
    if trainer.optimizer is None:
        return
    updated = updated_by(trainer.optimizer)
    if trainer._settings.keys() & {"adapt", "zero"} or any(
        name in names and id(tensor) not in updated for name, tensor in pipe.named_master_weights()
    ):
        raise UsageError(
            "optimizers= has an optimizer, and the pipeline updates other tensors than those of the model",
            expected="an optimizer that the pipeline makes",
            fix="pass optimizer_cls_and_kwargs= or set optim",
        )


def updated_by(optimizer: Any) -> set[int]:
    """Return the tensors that an optimizer updates, none if there is no optimizer yet."""
    return {id(tensor) for group in getattr(optimizer, "param_groups", ()) for tensor in group["params"]}


def refuse_short(model: nn.Module, num_batches: int, args: Any) -> None:
    """Refuse an update of fewer microbatches, where repeating one of them changes running statistics."""
    if any(
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats for module in model.modules()
    ):
        raise UsageError(
            f"the last update of the epoch has {num_batches} microbatches, and the model keeps running statistics",
            expected=f"{args.gradient_accumulation_steps} in every update",
            fix="use max_steps and a dataset of a multiple of that many batches",
        )
