"""What a trainer on a pipeline refuses: arguments that mean another way of training, and libraries that have moved."""

from __future__ import annotations

from typing import Any

import accelerate
import transformers
from accelerate.utils import parse_flag_from_env

from drumline.core.errors import refuse
from drumline.pipeline.passed_on import missing_method

# What the integration overrides or calls, and the parameters that it counts on.
_SEAM = {
    "create_accelerator_and_postprocess": "", "_get_dataloader": "dataset is_training", "_wrap_model": "model",
    "_move_model_to_device": "model device", "create_optimizer": "model", "_save_rng_state": "output_dir",
    "training_step": "model inputs num_items_in_batch", "log": "logs start_time",
    "compute_loss": "model inputs return_outputs num_items_in_batch", "save_model": "output_dir _internal_call",
    "prediction_step": "model inputs prediction_loss_only ignore_keys", "_load_best_model": "",
    "evaluation_loop": "dataloader prediction_loss_only ignore_keys", "floating_point_ops": "inputs",
    "_save_optimizer_and_scheduler": "output_dir", "_load_optimizer_and_scheduler": "checkpoint",
}  # fmt: skip
# Settings of a pipeline that the trainer's own arguments decide.
DECIDED = {
    "loss_fn": "the trainer's compute_loss", "loss_weight": "the trainer's compute_loss", "precision": "bf16=True",
    "model": "the trainer's model", "num_microbatches": "gradient_accumulation_steps",
}  # fmt: skip
_OUT, _DIVIDED, _REFERENCE = "leave it out", ": the pipeline divides the model", ": every step runs the reference"
# Arguments of TrainingArguments that are refused if they are set, and what to do instead.
_ARGUMENTS = {
    "deepspeed": _OUT + _DIVIDED, "fsdp": _OUT + _DIVIDED, "debug": _OUT, "fp16": "set bf16=True",
    "parallelism_config": _OUT + ', and pass pipeline={"mesh": ...} for several axes',
    "torch_compile": _OUT + ', and pass pipeline={"compile": True}',
    "auto_find_batch_size": "set per_device_train_batch_size",
    "activation_offloading": "set gradient_checkpointing=True",
    "predict_with_generate": _OUT + ", and generate from the saved model",
    "enable_jit_checkpoint": _OUT + ": ranks would stop at different steps",
    "fp16_full_eval": _OUT, "bf16_full_eval": _OUT, "use_liger_kernel": _OUT, "neftune_noise_alpha": _OUT,
    "precompute_ref_log_probs": _OUT + _REFERENCE, "sync_ref_model": _OUT + _REFERENCE,
}  # fmt: skip
# What `accelerate launch` says in the environment that it was configured with.
_ENGINES = [f"ACCELERATE_USE_{engine}" for engine in ("DEEPSPEED", "FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG")]


def check_version(trainer: type = transformers.Trainer) -> None:
    """Refuse a version of transformers whose Trainer has no such seams any more."""
    missing = missing_method(trainer, _SEAM)
    refuse((
        missing, f"transformers {transformers.__version__} with accelerate {accelerate.__version__} has no {missing}",
        "versions that Drumline was tested with: transformers 5.17 to 5.22, accelerate 1.15",
        "install one of these, or a newer Drumline",
    ))  # fmt: skip


def check(trainer: Any, settings: dict[str, Any], *, is_fitted: bool) -> None:
    """Refuse arguments of the trainer that do not go with a pipeline, or with its settings."""
    args, model = trainer.args, trainer.model
    values = [(name, getattr(args, name, None), fix) for name, fix in _ARGUMENTS.items()]
    of_trl = next((cls.__name__ for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")), "")
    adapt = settings.get("adapt")
    microbatches = adapt.get("microbatches", "keep") if isinstance(adapt, dict) else "keep"
    refuse(
        *((value, f"{name} is {value!r:.60}, on a pipeline", "a run without it", fix) for name, value, fix in values),
        *((parse_flag_from_env(name), f"{name} is set, on a pipeline", "a launch without it",
           f"choose multi-GPU in `accelerate config`{_DIVIDED}") for name in _ENGINES),
        (of_trl and not is_fitted, f"{of_trl} is one of TRL's trainers, which ask more of a model",
         "SFTTrainer or DPOTrainer from drumline.integrations.trl, or a class derived from them",
         "train with these; others of TRL do not run on a pipeline"),
        (args.mixed_precision not in ("no", "bf16"), f"mixed_precision is {args.mixed_precision!r}, on a pipeline",
         '"no" or "bf16"', "set bf16=True, or start with --mixed_precision bf16"),
        (model is None, "model_init is given, on a pipeline", "a model", "pass model="),
        (model is not None and any(param.is_meta for param in model.parameters()), "the model is on the meta device",
         "a model with memory: the trainer saves it as a whole", "load its weights"),
        (microbatches != "keep", f"adapt: microbatches is {microbatches!r:.60}, on a trainer",
         '"keep": gradient_accumulation_steps decides it', "leave it out"),
        (settings.get("slices", 1) != 1, f"slices is {settings.get('slices')!r:.60}, on a trainer",
         "1: a trainer computes its loss over whole sequences, which it pads",
         "leave it out, or use slices in a loop of your own or in `drumline train`"),
        (settings.get("zero") and args.save_strategy != "no" and not args.save_only_model,
         "checkpoints would hold the optimizer's state, which zero divides over lines",
         "checkpoints of weights alone, or zero=0", 'set save_only_model=True or save_strategy="no"'),
    )  # fmt: skip
