"""`--continue`: one command that starts a run or goes on with it, however far it came."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.reader import Checkpoint
from drumline.cli.train import add_arguments, resume_line, torchrun_line
from drumline.core.errors import RecordError, UsageError
from drumline.train import start as starting
from drumline.train.claim import FolderInUse, claim
from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    MeshSettings,
    ModelSettings,
    OptimizerSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.config.write import keep_settings
from drumline.train.export_models import finished_model
from drumline.train.folder import begin
from drumline.train.loop.progress import Told, Update
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from drumline.train.start import start
from refused import refused
from rotation import flip
from some import some

pytestmark = pytest.mark.torch
CONTINUES = CheckpointSettings(every=2, continues=True)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def settings_for(folder: Path, **tables: Any) -> TrainSettings:
    given = TrainSettings(
        model=ModelSettings(kind="mlp", num_layers=2, hidden=8),
        data=DataSettings(kind="points"),
        batch=BatchSettings(sequences=4, microbatch=2, sequence=1),
        mesh=MeshSettings(pipeline=2),
        pipeline=PipelineSettings(transport="in-process", device="cpu"),
        evaluation=EvaluationSettings(every=0),
        checkpoint=CONTINUES,
        run=RunSettings(steps=6, out=str(folder), threads=1),
    )
    return replace(given, **tables)


class Dies(Exception):
    """What kills a run."""


def dying_at(step: int) -> Any:
    def tell(told: Told) -> None:
        if isinstance(told, Update) and told.step == step:
            raise Dies

    return partial(run_training, tell=tell)


def ended(settings: TrainSettings) -> TrainResult:
    found: TrainResult = start(settings, train=partial(run_training, tell=lambda told: None))
    return found


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream")
def test_the_same_command_starts_goes_on_and_has_nothing_left_to_do(tmp_path: Path) -> None:
    whole = ended(settings_for(tmp_path / "whole"))
    settings, losses = settings_for(tmp_path / "run"), whole.losses
    for step in (1, 3, 6):  # before the first checkpoint, after it, and before the last
        with pytest.raises(Dies):
            start(settings, train=dying_at(step))
    found = ended(settings)
    assert (found.first_step, found.losses) == (4, losses[4:])
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["train/step"], line["train/loss"]) for line in lines] == list(enumerate(losses, start=1))
    restarts = (tmp_path / "run" / "restarts.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in restarts] == [0, 2, 4]
    before = sorted(tmp_path.rglob("*"))
    done = start(settings, train=lambda *_, **more: pytest.fail("a rank was started"))
    assert (done.first_step, done.losses, done.stopped) == (6, [], None)
    assert sorted(tmp_path.rglob("*")) == before, "a finished run stays as it is"
    more = ended(replace(settings, run=replace(settings.run, steps=8)))
    assert (more.first_step, len(more.losses)) == (6, 2)


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "stream")
def test_a_run_without_a_last_checkpoint_is_done_too(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run", checkpoint=replace(CONTINUES, every=0, at_end=False))
    assert len(ended(settings).losses) == 6
    assert start(settings, train=lambda *_, **more: pytest.fail("a rank was started")).first_step == 6


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream")
@pytest.mark.parametrize("left", ["", "run.lock", "rank0.jsonl", "metrics.jsonl", "notes.txt"])
def test_what_a_run_left_before_it_had_a_name_is_no_obstacle(tmp_path: Path, left: str) -> None:
    folder = tmp_path / "run"
    if left:
        folder.mkdir()
        (folder / left).touch()
    settings = settings_for(folder, run=RunSettings(steps=1, out=str(folder), threads=1))
    assert len(ended(settings).losses) == 1
    plain = replace(settings, checkpoint=CheckpointSettings())
    with refused(UsageError, "holds a run already,", fix="--continue --out .*run"):
        begin(plain)


def test_a_folder_in_use_is_refused_and_a_launcher_tells_its_ranks(tmp_path: Path) -> None:
    settings = settings_for(tmp_path / "run")
    with claim(tmp_path / "run") as other:
        other.keep()
        with refused(FolderInUse, "is under way"):
            start(settings)
    folder = str(tmp_path / "run")
    for expected in some([(folder, False, False), (folder, True, False)]):
        assert starting._outcome(settings, is_replanned=False) == expected
        starting._claims.pop().close()
        (tmp_path / "run" / "config.json").write_text("{}")


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream")
def test_only_damaged_checkpoints_do_not_start_a_run_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = settings_for(folder, run=RunSettings(steps=4, out=str(folder), threads=1))
    ended(settings)
    flip(folder / "checkpoints" / "step-00000004")  # the last one of a run that had made all its steps
    before = Checkpoint(folder / "checkpoints" / "step-00000002").model
    exported = finished_model(str(folder)).model.state_dict()
    assert all(torch.equal(exported[name], before[name]) for name in some(list(before)))
    flip(folder / "checkpoints" / "step-00000002")
    with refused(UsageError, "holds no checkpoint that is whole"):
        finished_model(str(folder))
    with refused(RecordError, "holds no checkpoint that is whole"):
        ended(settings)


def test_changed_settings_are_told_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step-00000002").mkdir(parents=True)
    settings = settings_for(folder)
    keep_settings(settings, folder)
    (folder / "config.json").write_text("{}")
    changed = replace(settings, optimizer=OptimizerSettings(lr=0.5), checkpoint=replace(CONTINUES, keep=7))
    begin(changed).claimed.close()
    assert "continues changed: optimizer.lr 0.0003 is now 0.5, checkpoint.keep 3 is now 7" in caplog.text
    for other, key in some(
        [
            (
                replace(settings, model=replace(settings.model, hidden=16)),
                r"model\.hidden is 16, and the run .* has 8",
            ),
            (replace(settings, model=ModelSettings()), r"model\.hidden is|model\.kind is"),
            (replace(settings, optimizer=OptimizerSettings(kind="SGD")), r"optimizer\.kind is 'SGD'"),
        ]
    ):
        with refused(UsageError, key):
            begin(other)
    claim(folder).close()


def test_without_a_folder_it_is_always_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = replace(settings_for(tmp_path), run=RunSettings())
    folders = []
    for _ in range(2):
        begun = begin(settings)
        folders.append((begun.settings.folder, begun.continues))
        (Path(begun.settings.folder) / "config.json").write_text("{}")
        begun.claimed.close()
    assert folders == [("out/train/mlp", False), ("out/train/mlp", True)]


def test_the_line_to_continue_with_is_the_same_line(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args(["notes.toml", "--continue", "--out", "runs/a"])
    settings = read_settings(None, {"checkpoint.continues": True, "run.out": "runs/a"})
    line = "drumline train notes.toml --set 'run.out=\"runs/a\"' --continue"
    assert resume_line(args, settings, "runs/a/checkpoints/step-00000002") == line
    assert torchrun_line(args, settings).endswith(f"-m {line}")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    assert resume_line(args, settings, "").startswith("torchrun --standalone")
