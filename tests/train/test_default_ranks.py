"""How many ranks `drumline train` starts if nobody says, on machines with none, one and several accelerators."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.channel.devices.choice import VisibleDevices
from drumline.cli.main import main
from drumline.core.errors import UsageError
from drumline.train.config.files.settings_file import read_judged
from drumline.train.config.settings import MeshSettings, PipelineSettings, TrainSettings
from drumline.train.default_ranks import for_devices, for_processes, with_default_ranks
from drumline.train.start import processes_of, with_device
from refused import refused

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("count", "over", "ranks", "words"),
    [
        (0, {}, 2, ""),
        (1, {}, 1, ""),
        (2, {}, 2, ""),
        (4, {}, 4, ""),
        (4, {"pipeline.device": "cpu"}, 2, ""),
        (4, {"pipeline.device": "cuda:3"}, 1, ""),
        (4, {"mesh.data": 2}, 2, ""),
        (1, {"mesh.data": 2}, 1, ""),
        (8, {"model.num_layers": 4}, 6, "the settings admit 6 ranks of 8: the other devices stay idle"),
        (4, {"pipeline.layers": [2, 2], "model.num_layers": 4}, 2, "the settings admit 2 ranks of 4"),
        (3, {"pipeline.schedule": "chimera"}, 2, "the settings admit 2 ranks of 3"),
    ],
)
def test_a_run_has_a_rank_for_each_device_that_its_settings_admit(
    count: int, over: dict[str, Any], ranks: int, words: str
) -> None:
    there = VisibleDevices("cuda", count) if count else VisibleDevices()
    chosen, text = for_devices(read_judged(None, over), there)
    assert chosen.settings.mesh.pipeline == ranks
    assert chosen.settings.pipeline.transport == "auto"
    assert words in text
    assert bool(text) == bool(words)


@pytest.mark.parametrize("over", [{"pipeline.schedule": "chimera"}, {"pipeline.layers": [2, 2], "model.num_layers": 4}])
def test_ranks_that_the_settings_need_take_turns_on_the_one_device(over: dict[str, Any]) -> None:
    chosen, text = for_devices(read_judged(None, over), VisibleDevices("cuda", 1))
    assert (chosen.settings.num_ranks, processes_of(chosen.settings)) == (2, 1)
    assert text == "the settings need 2 ranks, and this process sees cuda:0: they take turns on cuda:0"
    by_gloo = for_devices(read_judged(None, over | {"pipeline.transport": "gloo"}), VisibleDevices("cuda", 1))[0]
    assert (by_gloo.settings.num_ranks, by_gloo.settings.pipeline.transport) == (2, "gloo")


def test_whoever_names_a_number_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.train.default_ranks.visible", lambda: VisibleDevices("cuda", 4))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    named = read_judged(None, {"mesh.pipeline": 2})
    assert with_default_ranks(named) is named
    assert with_default_ranks(read_judged(None, {})).settings.num_ranks == 4


def test_under_a_launcher_there_is_a_rank_for_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.train.default_ranks.visible", lambda: VisibleDevices("cuda", 1))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert with_default_ranks(read_judged(None, {})).settings.num_ranks == 3
    lines = read_judged(None, {"mesh.data": 2})
    assert for_processes(lines, 6).settings.mesh.pipeline == 3
    assert for_processes(lines, 3) is lines  # which is refused later
    assert for_processes(lines, 1) is lines


@pytest.fixture
def one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.train.start.visible", lambda: VisibleDevices("cuda", 1))
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(
    ("ranks", "device", "transport", "expected", "words"),
    [
        (1, "", "auto", "cuda", ""),
        (2, "", "auto", "cuda", "2 ranks were asked for, and this process sees cuda:0: they share it"),
        (2, "cuda:0", "auto", "cuda:0", "2 ranks were asked for on cuda:0 alone: they share it"),
        (2, "", "in-process", "cuda", ""),
        (2, "cpu", "auto", "cpu", ""),
    ],
)
def test_more_ranks_than_devices_share_them_and_are_warned_of(
    ranks: int, device: str, transport: str, expected: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = TrainSettings(
        mesh=MeshSettings(pipeline=ranks), pipeline=PipelineSettings(device=device, transport=transport)
    )
    with caplog.at_level(logging.WARNING, "drumline"):
        assert with_device(given).pipeline.device == expected
    assert [words in record.getMessage() for record in caplog.records] == ([True] if words else [])


@pytest.mark.usefixtures("one_device")
@pytest.mark.parametrize(("device", "words"), [("cuda:1", "this process sees cuda:0"), ("mps", "no such device")])
def test_a_device_that_is_not_there_is_refused_before_ranks_start(device: str, words: str) -> None:
    with refused(UsageError, words):
        with_device(replace(TrainSettings(), pipeline=PipelineSettings(device=device)))


@pytest.mark.usefixtures("one_device")
def test_ranks_of_a_host_with_fewer_devices_than_others_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # of one device, while another host has four for four
    assert with_device(TrainSettings(mesh=MeshSettings(pipeline=6))).pipeline.device == "cuda"


def test_the_first_line_says_where_ranks_compute_and_the_result_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    small = "--set model.num_layers=2 --set model.hidden=16 --set model.num_heads=2 --sequence 8 --batch 4 -m 2"
    try:
        words = f"train {small} --steps 1 --device cpu --set pipeline.transport=in-process --out run --json".split()
        assert main(words) == 0
    finally:
        torch.set_num_threads(threads)
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "ranks 0-1 on cpu, in-process"
    devices = json.loads(out)["devices"]
    assert devices["text"] == "ranks 0-1 on cpu, in-process"
    assert json.loads(Path("run/environment.json").read_text())["devices"] == devices
