"""What a trainer on a pipeline refuses: arguments that mean another way of training, and libraries that have moved."""

from __future__ import annotations

import inspect
from typing import Any

import accelerate
import transformers

from drumline.core.errors import UsageError

# What the integration overrides or calls, and the parameters that it counts on.
_SEAM = {
    "create_accelerator_and_postprocess": (),
    "_get_dataloader": ("dataset", "is_training"),
    "_get_num_items_in_batch": ("batch_samples", "device"),
    "_inner_training_loop": (),
    "_wrap_model": ("model", "training"),
    "_move_model_to_device": ("model", "device"),
    "create_optimizer": ("model",),
    "get_batch_samples": ("epoch_iterator", "num_batches", "device"),
    "training_step": ("model", "inputs", "num_items_in_batch"),
    "compute_loss": ("model", "inputs", "return_outputs", "num_items_in_batch"),
    "prediction_step": ("model", "inputs", "prediction_loss_only", "ignore_keys"),
    "evaluation_loop": ("dataloader", "prediction_loss_only", "ignore_keys"),
    "_clip_grad_norm": ("model",),
    "_get_grad_norm": ("model", "grad_norm"),
    "save_model": ("output_dir", "_internal_call"),
    "_load_from_checkpoint": ("resume_from_checkpoint",),
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
                expected="a version like those that Drumline was tested with: transformers 5.22, accelerate 1.15",
                fix="install one of these, or a newer Drumline",
            )


def check(trainer: Any, settings: dict[str, Any]) -> None:
    """Refuse arguments of the trainer, and settings of the pipeline, that do not go together."""
    args = trainer.args
    for name, fix in _ARGUMENTS.items():
        if value := getattr(args, name, None):
            raise UsageError(f"{name} is {value!r:.60}, on a pipeline", expected="a run without it", fix=fix)
    if trainer.model_init is not None:
        raise UsageError("model_init is given, on a pipeline", expected="a model", fix="pass model=")
    for name, decides in _SETTINGS.items():
        if name in settings:
            raise UsageError(
                f"pipeline has the setting {name}", expected=f"none: {decides} decides it", fix="leave it out"
            )
