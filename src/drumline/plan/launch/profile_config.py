"""A plan of a profiled model as Drumline's own config: the plan's JSON file, beside the model that was profiled."""

from __future__ import annotations

from typing import Any

from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan
from drumline.plan.launch.launch import FORMAT, VERSION
from drumline.plan.launch.toml import document

# Take the function that was profiled for model and data.
_MODEL, _DATA = "drumline.train.profiled_model:model", "drumline.train.profiled_model:data"
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"kind": "AdamW"},
    "momentum": {"kind": "SGD", "settings": {"momentum": 0.9}},
    "sgd": {"kind": "SGD"},
}


def profile_config(profile: ModelProfile, plan: Plan, *, plan_file: str) -> str:
    """Return the config of a plan that stands in `plan_file`; without a word of the model if the profile has none."""
    batch = {"sequences": plan.batch, "microbatch": plan.microbatch_size}
    tables: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    comment = f"A plan of `drumline plan`, for {plan.model.name} with {plan.model.num_parameters:,} parameters."
    if profile.source.endswith(".json"):
        tables["model"] = {"kind": "hf", "path": profile.source}
        batch["sequence"] = profile.sequence
    elif profile.source:
        comment += "\nIt trains on the batch of the function that was profiled: name your data in [data]."
        arguments = {"source": profile.source}
        tables["model"] = {"kind": "function", "name": plan.model.name, "function": _MODEL, "arguments": arguments}
        tables["data"] = {"kind": "function", "function": _DATA, "arguments": arguments}
    else:
        comment += "\nThe profile does not say where its model comes from: name it in [model]."
    tables |= {
        "batch": batch,
        "mesh": {"pipeline": plan.num_ranks},
        "pipeline": {"plan": plan_file},
        "optimizer": _OPTIMIZERS.get(plan.optimizer, {}),
    }
    return document(tables, comment=comment)
