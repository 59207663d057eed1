"""What a trainer on a pipeline refuses: arguments that mean another way of training, and libraries that have moved."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import accelerate
import transformers
from accelerate.utils import parse_flag_from_env
from torch import nn

from drumline.core.errors import UsageError, nearest
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
# What `accelerate launch` says in the environment that it was configured with.
_ENGINES = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")
_ENGINES_FIX = "choose multi-GPU in `accelerate config`: the pipeline divides the model"
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


def refuse(*rows: tuple[Any, str, str, str]) -> None:
    """Refuse the first row that is true: what there is, what is expected, and how to mend it.

    >>> refuse((False, "sync_ref_model is True", "False", "leave it out"))
    """
    for there, error, expected, fix in rows:
        if there:
            raise UsageError(error, expected=expected, fix=fix)


def check_given(model: Any, settings: Any) -> None:
    """Refuse a model that something else has wrapped, and settings that are no dict."""
    wrappers = (Pipeline, nn.parallel.DistributedDataParallel, nn.DataParallel)
    refuse(
        (isinstance(model, wrappers) or hasattr(model, "_orig_mod"), f"the model is wrapped: a {type(model).__name__}",
         "the model itself", 'pass the model, and pipeline={...} with settings such as "compile"'),
        (settings is not None and not isinstance(settings, Mapping), f"pipeline is {settings!r:.60}",
         "a dict of settings of dl.Pipeline", 'pass pipeline={"num_ranks": 2}, say, or leave it out'),
    )  # fmt: skip


def check(trainer: Any, settings: dict[str, Any]) -> None:
    """Refuse arguments of the trainer, and settings of the pipeline, that do not go together."""
    args, model = trainer.args, trainer.model
    for name, fix in _ARGUMENTS.items():
        value = getattr(args, name, None)
        refuse((value, f"{name} is {value!r:.60}, on a pipeline", "a run without it", fix))
    for engine in _ENGINES:
        name = f"ACCELERATE_USE_{engine}"
        refuse((parse_flag_from_env(name), f"{name} is set, on a pipeline", "a launch without it", _ENGINES_FIX))
    for name in settings:
        decides, known = _SETTINGS.get(name, ""), inspect.signature(Pipeline).parameters
        refuse(
            (decides, f"pipeline has the setting {name}", f"none: {decides} decides it", "leave it out"),
            (name not in known, f"pipeline has the setting {name!r}", "settings of dl.Pipeline", nearest(name, known)),
        )
    of_trl = "".join([cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")][:1])
    adapt = settings.get("adapt")
    microbatches = adapt.get("microbatches", "keep") if isinstance(adapt, dict) else "keep"
    refuse(
        (of_trl and trainer._calls_once, f"{of_trl} is one of TRL's trainers, which ask more of a model",
         "SFTTrainer or DPOTrainer from drumline.integrations.trl, or a class derived from them",
         "train with these; others of TRL do not run on a pipeline"),
        (args.mixed_precision not in ("no", "bf16"), f"mixed_precision is {args.mixed_precision!r}, on a pipeline",
         '"no" or "bf16"', "set bf16=True, or start with --mixed_precision bf16"),
        (model is None, "model_init is given, on a pipeline", "a model", "pass model="),
        (model is not None and any(param.is_meta for param in model.parameters()), "the model is on the meta device",
         "a model with memory: the trainer saves it as a whole", "load its weights"),
        (microbatches != "keep", f"adapt: microbatches is {microbatches!r:.60}, on a trainer",
         '"keep": gradient_accumulation_steps decides it', "leave it out"),
        (settings.get("zero") and args.save_strategy != "no" and not args.save_only_model,
         "checkpoints would hold the optimizer's state, which zero divides over lines",
         "checkpoints of weights alone, or zero=0", 'set save_only_model=True or save_strategy="no"'),
    )  # fmt: skip


def check_pipeline(trainer: Any, pipe: Pipeline, names: set[str]) -> None:
    """Refuse schedules that update or put out otherwise than the trainer, and an optimizer of other tensors."""
    program = pipe.program
    ends = "updates inside of a step" if program.num_updates else "has two last stages"
    others = "".join(sorted(set(pipe.axes.names) - {"pp", "dp"})[:1])
    updated = updated_by(trainer.optimizer)
    missed = any(name in names and id(tensor) not in updated for name, tensor in pipe.named_master_weights())
    refuse(
        (program.num_updates or program.placement.name == "bidirectional", f"the schedule {program.name} {ends}",
         "a schedule with a flush and one last stage", "leave out the schedule, or choose another one"),
        (others, f"the mesh has the axis {others}, on a trainer", "pp and dp alone", "use a loop of your own"),
        (trainer.args.include_num_input_tokens_seen != "no" and pipe.axes.rows[1] > 1,
         "include_num_input_tokens_seen is set, with data-parallel lines", "one line", "leave it out"),
        (trainer.optimizer is not None and (trainer._settings.keys() & {"adapt", "zero"} or missed),
         "optimizers= has an optimizer, and the pipeline updates other tensors than those of the model",
         "an optimizer that the pipeline makes", "pass optimizer_cls_and_kwargs= or set optim"),
    )  # fmt: skip


def updated_by(optimizer: Any) -> set[int]:
    """Return the tensors that an optimizer updates, none if there is no optimizer yet."""
    return {id(tensor) for group in getattr(optimizer, "param_groups", ()) for tensor in group["params"]}


def check_short(model: nn.Module, num_batches: int, size: int) -> None:
    """Refuse an update of fewer microbatches, where repeating one of them changes running statistics."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._NormBase)]
    refuse((
        any(norm.track_running_stats for norm in norms),
        f"the last update of the epoch has {num_batches} microbatches, and the model keeps running statistics",
        f"{size} in every update", "use max_steps and a dataset of a multiple of that many batches",
    ))  # fmt: skip
