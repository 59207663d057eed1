"""Runs whose ranks or launchers die: what starts again ends where an uninterrupted run ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.core.measured.run import read_run
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    FailureSettings,
    MeshSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.start import start

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, EVERY = 12, 4
FRAGILE = str(Path(__file__).with_name("fragile.py"))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def settings_for(folder: Path, *, ranks: int = 2, **tables: Any) -> TrainSettings:
    """Return settings of a model whose orders to die lie beside the run."""
    given = TrainSettings(
        model=ModelSettings(kind="function", function=f"{FRAGILE}:model", arguments={"orders": f"{folder}.orders"}),
        data=DataSettings(kind="points"),
        batch=BatchSettings(sequences=8, microbatch=2, sequence=1),
        mesh=MeshSettings(pipeline=ranks),
        pipeline=PipelineSettings(device="cpu", timeout=60.0),
        evaluation=EvaluationSettings(every=3, batches=1),
        checkpoint=CheckpointSettings(every=EVERY),
        run=RunSettings(steps=STEPS, out=str(folder), threads=1),
    )
    return replace(given, **tables)


def order(folder: Path, *names: str) -> None:
    orders = Path(f"{folder}.orders")
    orders.mkdir(exist_ok=True)
    for name in names:
        (orders / name).touch()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(one["train/step"], one["train/loss"]) for one in lines(folder / "metrics.jsonl")]


def tensors(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    return {one.name: one.read_bytes() for one in sorted(last.glob("*.safetensors"))}


def same_end(one: Path, other: Path) -> None:
    """Hold two runs against each other: every step once, every bit the same."""
    assert losses(one) == losses(other)
    assert [step for step, _ in losses(one)] == list(range(1, STEPS + 1))
    assert tensors(one) == tensors(other) != {}
    held_out = [[(line["step"], line["loss"]) for line in lines(run / "evaluations.jsonl")] for run in (one, other)]
    assert held_out[0] == held_out[1]
    assert read_run(one).num_steps >= 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    start(settings_for(folder))
    return folder


def test_local_ranks_start_again_and_end_like_an_uninterrupted_run(tmp_path: Path, whole: Path) -> None:
    folder = tmp_path / "run"
    order(folder, "1-0-a", f"0-{EVERY}-b")
    start(settings_for(folder, failures=FailureSettings(restarts=2)))
    same_end(folder, whole)
    restarts = lines(folder / "restarts.jsonl")
    assert [(one["step"], one["ranks"]) for one in restarts] == [(0, 2), (EVERY, 2)]
    assert all(0 <= one["lost"] <= 2 * EVERY for one in restarts)
    assert read_run(folder / "earlier" / "02").num_steps >= 1


def test_fewer_ranks_go_on_where_one_does_not_come_back(
    tmp_path: Path, whole: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    order(folder, f"1-{EVERY}-a", f"1-{EVERY}-b")
    chimera = PipelineSettings(device="cpu", schedule="chimera", timeout=60.0)
    start(settings_for(folder, ranks=2, pipeline=chimera, failures=FailureSettings(restarts=2, elastic=True)))
    found = losses(folder)
    assert [step for step, _ in found] == list(range(1, STEPS + 1))
    assert [one for _, one in found] == pytest.approx([one for _, one in losses(whole)], rel=1e-6)
    assert [one["ranks"] for one in lines(folder / "restarts.jsonl")] == [2, 1]
    assert "planned for 1 rank instead of 2; schedule 1f1b, because chimera does not admit" in caplog.text
    assert "rank 1 was killed by SIGKILL; restart 2 of 2, on 1 rank" in caplog.text
