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
from integrations.cases import CASES, Making, Outcome, all_cases, llama, resume, with_adapters

transformers: Any = needed("transformers", extra="hf")
needed("peft", extra="tune")
pytestmark = [pytest.mark.torch, pytest.mark.slow]
CLOSE = 1e-5  # what a mean of many losses may lose
TIED = "smoothed"  # the script whose model has tied weights


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("trainers")
    return folder / "plain", folder / "ranks"


@pytest.fixture(scope="module")
def plain(folders: tuple[Path, Path]) -> dict[str, Outcome]:
    return all_cases("plain", *folders)


@pytest.fixture(scope="module")
def ranks(folders: tuple[Path, Path], plain: dict[str, Outcome]) -> list[dict[str, Outcome]]:
    others, folder = folders
    return dl.launch(all_cases, "pipeline", folder, others, {"schedule": "1f1b"}, num_ranks=2)


def differences(mine: Any, wanted: Any, where: str = "") -> list[str]:
    """Return where two outcomes differ: tensors at all, numbers by more than CLOSE."""
    if isinstance(wanted, Tensor) and where.startswith(TIED):  # whose gradients from two stages add up in another order
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


@pytest.mark.parametrize("name", CASES)
def test_a_script_trains_logs_evaluates_and_saves_as_in_one_process(
    name: str, ranks: list[dict[str, Outcome]], plain: dict[str, Outcome]
) -> None:
    for each in ranks:
        wanted = {what: value for what, value in plain[name].items() if what != "resumed"}
        assert differences(each[name], wanted, name) == []


@pytest.mark.parametrize("name", ["saved", "saved adapters"])
def test_checkpoints_resume_on_ranks_and_in_one_process(
    name: str, ranks: list[dict[str, Outcome]], plain: dict[str, Outcome], folders: tuple[Path, Path], tmp_path: Path
) -> None:
    wanted = plain[name]["resumed"]["own"]
    if name == "saved adapters":  # random batches are others after a resume, even in one process
        assert differences(wanted["weights"], plain[name]["weights"]) == []
    for each in ranks:
        for checkpoint in ("own", "other"):
            assert differences(each[name]["resumed"][checkpoint], wanted, checkpoint) == []
    model = llama if name == "saved" else with_adapters
    make = Making(transformers.Trainer, tmp_path, tmp_path)
    theirs = resume(make, model, folders[1] / name / "out" / "checkpoint-2", save_steps=2, save_strategy="steps")
    assert differences(theirs, wanted, "in one process") == []


@pytest.mark.parametrize("name", ["saved", "saved adapters"])
def test_files_are_those_of_one_process_in_every_tensor(
    name: str, ranks: list[dict[str, Outcome]], folders: tuple[Path, Path]
) -> None:
    mine, theirs = (folder / name / "out" / "checkpoint-4" for folder in reversed(folders))
    for file in ("optimizer.pt", "scheduler.pt"):
        assert differences(torch.load(mine / file), torch.load(theirs / file), file) == []
    (weights,) = (file.name for file in theirs.glob("*model.safetensors"))
    load = needed("safetensors.torch", extra="hf").load_file
    assert differences(load(mine / weights), load(theirs / weights), weights) == []
    assert {file.name for file in theirs.iterdir()} <= {file.name for file in mine.iterdir()}
