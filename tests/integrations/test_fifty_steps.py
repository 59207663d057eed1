"""Fifty steps of a trainer on two ranks against one process, and resumed in the middle: `make matrices` runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import drumline as dl
from extras import needed
from integrations.cases import Making, Outcome, outcome, trainer_of
from integrations.models import llama, texts, with_adapters
from integrations.test_trainer import differences
from matrices import long

transformers: Any = needed("transformers", extra="hf")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
MODELS: dict[str, Callable[[], nn.Module]] = {"llama": lambda: llama(4), "adapters": lambda: with_adapters(4)}
GIVEN: dict[str, Any] = {
    "max_steps": 50, "logging_steps": 5, "save_strategy": "steps", "save_steps": 25, "learning_rate": 1e-3,
    "weight_decay": 0.1, "warmup_steps": 5, "lr_scheduler_type": "cosine", "train_dataset": texts(150),
}  # fmt: skip


def fifty(kind: str, folder: Path, name: str, checkpoint: Path | None, settings: dict[str, Any] | None) -> Outcome:
    """Train fifty steps, or the last 25 of them."""
    transformers.utils.logging.set_verbosity_error()
    trainer = Making(trainer_of(kind), folder, folder, settings)(MODELS[name](), **GIVEN)
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return outcome(trainer, after=trainer.evaluate()["eval_loss"])


@long
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("name", MODELS)
def test_fifty_steps_train_and_resume_as_in_one_process(name: str, schedule: str, tmp_path: Path) -> None:
    plain, mine = tmp_path / "plain", tmp_path / "mine"
    wanted = fifty("plain", plain, name, None, None)
    resumed = fifty("plain", tmp_path / "again", name, plain / "out" / "checkpoint-25", None)
    assert differences(resumed["weights"], wanted["weights"]) == []
    settings = {"schedule": schedule}
    for each in dl.launch(fifty, "pipeline", mine, name, None, settings, num_ranks=2):
        assert differences(each, wanted) == []
    for number, folder in enumerate((mine, plain)):
        checkpoint = folder / "out" / "checkpoint-25"
        for each in dl.launch(fifty, "pipeline", tmp_path / f"{number}", name, checkpoint, settings, num_ranks=2):
            assert differences(each, resumed) == []
    theirs = fifty("plain", tmp_path / "theirs", name, mine / "out" / "checkpoint-25", None)
    assert differences(theirs, resumed) == []
