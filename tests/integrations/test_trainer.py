"""The Trainer of transformers on a pipeline of two real ranks does what it does in one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drumline as dl
from extras import needed
from integrations.cases import Making, Outcome, all_cases, resume
from integrations.models import small, small_with_adapters

transformers: Any = needed("transformers", extra="hf")
needed("peft", extra="tune")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]
CLOSE = 1e-5  # what a mean of many losses may lose
ROUNDED = ("smoothed", "lines")  # scripts whose gradients add up in another order: from two stages, or from two lines
MODELS = {"saved": small, "saved adapters": small_with_adapters}  # of the scripts that resume


def differences(mine: Any, wanted: Any, where: str = "") -> list[str]:
    """Return where two outcomes differ: tensors at all, numbers by more than CLOSE."""
    if isinstance(wanted, Tensor) and where.startswith(ROUNDED):
        return [] if torch.allclose(mine, wanted, rtol=CLOSE, atol=1e-6) else [f"{where}: {mine}, not {wanted}"]
    if isinstance(wanted, Tensor):
        return [] if torch.equal(mine, wanted) else [f"{where}: by {float((mine - wanted).abs().max())}"]
    if isinstance(wanted, float):
        return [] if math.isclose(mine, wanted, rel_tol=CLOSE, abs_tol=CLOSE) else [f"{where}: {mine}, not {wanted}"]
    if isinstance(wanted, dict):
        if mine.keys() < wanted.keys():
            return [f"{where}: no {sorted(wanted.keys() - mine.keys())}"]
        return [each for name in wanted for each in differences(mine[name], wanted[name], f"{where}/{name}")]
    if isinstance(wanted, list):
        if len(mine) != len(wanted):
            return [f"{where}: {mine}, not {wanted}"]
        return [each for at, value in enumerate(wanted) for each in differences(mine[at], value, f"{where}[{at}]")]
    return [] if mine == wanted else [f"{where}: {mine}, not {wanted}"]


def test_every_script_trains_logs_evaluates_saves_and_resumes_as_in_one_process(tmp_path: Path) -> None:
    theirs, mine = tmp_path / "plain", tmp_path / "ranks"
    plain = all_cases("plain", theirs, mine)
    ranks = dl.launch(all_cases, "pipeline", mine, theirs, {}, num_ranks=2)
    for each in ranks:
        assert each.keys() == plain.keys()
        for name, outcome in plain.items():
            wanted = {what: value for what, value in outcome.items() if what != "resumed"}
            assert differences(each[name], wanted, name) == []
    for name in MODELS:
        check_resumed(name, [each[name] for each in ranks], plain[name], mine / name, tmp_path)
        check_files(mine / name / "out" / "checkpoint-4", theirs / name / "out" / "checkpoint-4")


def check_resumed(name: str, ranks: list[Outcome], plain: Outcome, folder: Path, scratch: Path) -> None:
    """Runs resume alike from checkpoints of ranks and of one process, on ranks and in one process."""
    wanted = plain["resumed"]["own"]
    if name == "saved adapters":  # random batches are others after a resume, even in one process
        assert differences(wanted["weights"], plain["weights"]) == []
    for each in ranks:
        for checkpoint in ("own", "other"):
            assert differences(each["resumed"][checkpoint], wanted, checkpoint) == []
    make = Making(transformers.Trainer, scratch / name, scratch)
    theirs = resume(make, MODELS[name], folder / "out" / "checkpoint-2", save_steps=2, save_strategy="steps")
    assert differences(theirs, wanted, "in one process") == []


def check_files(mine: Path, theirs: Path) -> None:
    """A checkpoint of ranks has the files of one process, and every tensor in them."""
    for file in ("optimizer.pt", "scheduler.pt"):
        assert differences(torch.load(mine / file), torch.load(theirs / file), file) == []
    (weights,) = (file.name for file in theirs.glob("*model.safetensors"))
    load = needed("safetensors.torch", extra="hf").load_file
    assert differences(load(mine / weights), load(theirs / weights), weights) == []
    assert {file.name for file in theirs.iterdir()} <= {file.name for file in mine.iterdir()}
