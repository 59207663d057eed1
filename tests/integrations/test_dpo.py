"""`DPOTrainer` on a pipeline: policy and reference run, and all numbers are those of TRL's own in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.errors import UsageError
from extras import needed
from integrations.trl_runs import IN_ONE_PROCESS, MARKS, assert_runs_alike, data, llama, lora, trainer
from refused import refused

peft: Any = needed("peft", extra="tune")
trl: Any = needed("trl", extra="trainers")
Trainer: Any = needed("drumline.integrations.transformers", extra="hf").Trainer
DPOTrainer: Any = needed("drumline.integrations.trl", extra="trainers").DPOTrainer

pytestmark = MARKS


def trained_again() -> Any:
    """Return a model with an adapter that has trained: what it is now becomes the reference."""
    model = peft.get_peft_model(llama(), lora())
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    return model


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adapters": ({"eval_strategy": "steps", "eval_steps": 1}, {"peft_config": lora}),
    "an adapter that trains on": ({"loss_type": ["sigmoid", "ipo"], "use_weighting": True}, {"model": trained_again}),
    "a model as reference": ({"ld_alpha": 0.5}, {"ref_model": lambda: llama(seed=1)}),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    assert_runs_alike((trl.DPOTrainer, DPOTrainer), tmp_path, "preferences", *RUNS[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"precompute_ref_log_probs": True}, "precompute_ref_log_probs is True, on a pipeline"),
        ({"sync_ref_model": True}, "sync_ref_model is True, on a pipeline"),
    ],
)
def test_another_kind_of_reference_is_refused_by_name(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with refused(UsageError, message):
        trainer(DPOTrainer, tmp_path, data("preferences", 8), changes, pipeline=IN_ONE_PROCESS, ref_model=llama(seed=1))


def test_trainers_of_trl_that_are_not_fitted_are_refused_by_name(tmp_path: Path) -> None:
    mixed = type("Mixed", (Trainer, trl.DPOTrainer), {})
    with refused(UsageError, "DPOTrainer is one of TRL's trainers, which ask more of a model"):
        trainer(mixed, tmp_path, data("preferences", 8), {}, pipeline=IN_ONE_PROCESS, ref_model=llama(seed=1))
