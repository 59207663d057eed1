"""TRL's trainers on two ranks: logs, checkpoints and saved weights are those of one process, and so is resuming."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import drumline as dl
from extras import needed
from integrations.trl_runs import MARKS, assert_same, assert_same_weights, data, llama, logs, lora, trainer
from matrices import ALL

trl: Any = needed("trl", extra="trainers")
safetensors: Any = needed("safetensors.torch", extra="hf")
ours: Any = needed("drumline.integrations.trl", extra="trainers")

pytestmark = [*MARKS, pytest.mark.matrix, pytest.mark.timeout(900)]
STEPS = 50 if ALL else 4
Logs = list[dict[str, float]]


def scripts(supervised: type, preferring: type, folder: str, settings: dict[str, Any]) -> dict[str, Logs]:
    """Train with LoRA, from the middle of these steps again, on preferences, and on two lines."""
    warnings.simplefilter("ignore")
    outcomes = {}
    saves = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": STEPS // 2}
    for name in ("plain", "lora", "again") if ALL else ("lora", "again"):
        named = {} if name == "plain" else {"peft_config": lora()}
        path = Path(folder) / name.replace("again", "lora")
        run = trainer(supervised, path, data("texts", 40), saves, **named, **settings)
        run.train(resume_from_checkpoint=str(path / f"checkpoint-{STEPS // 2}") if name == "again" else None)
        outcomes[name] = logs(run)
        run.save_model(str(Path(folder) / f"saved-{name}"))
    rows = data("preferences", 22)
    run = trainer(preferring, Path(folder) / "preferences", rows, {}, ref_model=llama(seed=1), **settings)
    run.train()
    run.save_model(str(Path(folder) / "saved-preferences"))
    outcomes["preferences"] = logs(run)
    # Two lines take four rows together, and two at a time in evaluations.
    lines = {"pipeline": {"mesh": {"dp": 2}}} if settings else {}
    wide = {"per_device_train_batch_size": 2 if lines else 4, "per_device_eval_batch_size": 2}
    on_lines = [("texts", supervised, "texts"), ("pairs", preferring, "preferences")]
    for name, kind, rows in on_lines if ALL else on_lines[:1]:
        named = {"ref_model": llama(seed=1)} if name == "pairs" else {}
        run = trainer(kind, Path(folder) / name, data(rows, 40), wide, eval_dataset=data(rows, 5), **named, **lines)
        run.train()
        outcomes[name] = [{key: entry[key] for key in entry.keys() - {"total_flos"}} for entry in logs(run)]
        run.save_model(str(Path(folder) / f"saved-{name}"))
    return outcomes


def test_two_ranks_log_and_save_what_one_process_does_and_so_does_resuming(tmp_path: Path) -> None:
    plain = scripts(trl.SFTTrainer, trl.DPOTrainer, str(tmp_path / "plain"), {})
    own_folder = str(tmp_path / "own")
    for outcomes in dl.launch(scripts, ours.SFTTrainer, ours.DPOTrainer, own_folder, {"pipeline": {}}, num_ranks=2):
        for name, wanted in plain.items():
            assert_same(outcomes[name], wanted)
    once, again = ([entry["loss"] for entry in plain[name][STEPS // 2 : STEPS]] for name in ("lora", "again"))
    assert once == again
    files = [path.relative_to(tmp_path / "plain") for path in (tmp_path / "plain").rglob("*.safetensors")]
    assert len(files) == (10 if ALL else 6)
    for file in files:
        own, wanted_tensors = (safetensors.load_file(tmp_path / who / file) for who in ("own", "plain"))
        assert_same_weights(own, wanted_tensors, within=2e-5)
