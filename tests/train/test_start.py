"""How ranks of a run are started: by one command, or in place under torchrun."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drumline.core.errors import RankFailed, UsageError
from drumline.train.config.settings import MeshSettings, PipelineSettings, RunSettings, TrainSettings
from drumline.train.start import start, threads_of, with_device
from refused import refused

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
ON_CPU = PipelineSettings(device="cpu")


def standing_in(settings: TrainSettings) -> tuple[str, str, int, int]:
    """Stand in for the training loop."""
    if settings.run.seed == 13 and os.environ["RANK"] == "1":
        raise ZeroDivisionError("no luck")
    return os.environ["RANK"], os.environ["WORLD_SIZE"], settings.run.steps, torch.get_num_threads()


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainSettings:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return TrainSettings(pipeline=ON_CPU, run=RunSettings(steps=7, threads=1, out=str(tmp_path / "run")))


def test_local_ranks_are_started_and_rank_0_returns(settings: TrainSettings) -> None:
    assert start(settings, train=standing_in) == ("0", "2", 7, 1)
    with pytest.raises(RankFailed, match="no luck"):
        start(replace(settings, run=replace(settings.run, seed=13)), train=standing_in)


def test_one_rank_runs_in_this_process(settings: TrainSettings) -> None:
    found = start(replace(settings, mesh=MeshSettings(pipeline=1)), train=lambda value: (os.getpid(), value))
    assert found[0] == os.getpid()


def test_under_torchrun_this_process_is_a_rank(settings: TrainSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert start(settings, train=lambda value: os.getpid()) == os.getpid()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with refused(UsageError, "torchrun started 3 ranks for a config of 2", fix="--nproc-per-node 2"):
        start(settings, train=standing_in)


def test_a_folder_with_a_run_is_refused_before_ranks_start(settings: TrainSettings) -> None:
    Path(settings.folder).mkdir()
    Path(settings.folder, "config.json").touch()
    with refused(UsageError, r"run\.out: .*run holds a run already"):
        start(settings, train=standing_in)
    named = Path(settings.folder, "config.json")
    with refused(UsageError, "is a file"):
        start(replace(settings, run=replace(settings.run, out=str(named))), train=standing_in)


def test_devices_that_are_not_there_are_refused_and_threads_share_the_cores(settings: TrainSettings) -> None:
    with refused(UsageError, "device is 'gpu'"):
        with_device(replace(settings, pipeline=PipelineSettings(device="gpu")))
    assert with_device(TrainSettings()).pipeline.device
    assert threads_of(settings) == 1
    assert 1 <= threads_of(TrainSettings()) <= max(1, (os.cpu_count() or 2) // 2)
