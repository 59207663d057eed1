"""Runs of `drumline train` on meshes: NaNs, signals, checkpoints for other meshes, measured cuts and failures.

All that needs no process to die happens in one launch of four ranks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import ConfigError, MismatchError, RankFailed, UsageError
from drumline.engine.stages.balance import Balance, balanced
from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    FailureSettings,
    LearningRateSettings,
    MemorySettings,
    MeshSettings,
    ModelSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.data.items.batch import Batch, Data
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from drumline.train.models.built import Built
from drumline.train.replan import fewest_of, most_within, planned_for
from drumline.train.start import start
from matrices import long
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS, WIDTH, STEPS, BAD = 8, 4, 6, 2
SPIKE = 1e3  # an input from which on gradients become infinite, while the loss does not
FRAGILE = str(Path(__file__).parents[1] / "train" / "fragile.py")
DP, PP, TP = MeshSettings(pipeline=2, data=2), MeshSettings(pipeline=4), MeshSettings(pipeline=2, tensor=2)
ONE = MeshSettings(pipeline=1)


class _Spiky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, is_spiky: bool) -> Tensor:
        ctx.is_spiky = is_spiky
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient = gradients[0].clone()
        if ctx.is_spiky:
            gradient[:, 0] = torch.inf
        return gradient, None


class Spiky(nn.Linear):
    """A layer of which the gradients of its first row overflow where an input is large."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        made: Tensor = _Spiky.apply(super().forward(x), bool((x > SPIKE).any()))  # type: ignore[no-untyped-call]
        return made


class FeedForward(nn.Module):
    """A block that an axis tp can divide."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return the same and what is added."""
        made: Tensor = x + self.down(torch.tanh(self.up(x)))
        return made


class Chain(nn.Sequential):
    """A few blocks, with their plan for an axis tp."""

    tensor_parallel_plan: ClassVar = {"*.up": "colwise", "*.down": "rowwise"}


def made_model(settings: TrainSettings, *, device: str = "cpu") -> Built:
    torch.manual_seed(1)
    return Built(
        Chain(Spiky(WIDTH, WIDTH), *(FeedForward() for _ in range(4)), nn.Linear(WIDTH, 2)),
        nn.functional.mse_loss,
        inputs="points",
    )


class Points:
    """Batches of which each line gets its rows; one may have a spike in the last row, or a NaN in its target."""

    def __init__(self, rank: int, size: int, bad: str) -> None:
        self.rank, self.size, self.bad, self.position = rank, size, bad, 0

    def batch(self, number: int) -> Batch:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        y = x[:, :2].sin()
        if number == BAD and self.bad == "nan":
            y[-1] = torch.nan
        if number == BAD and self.bad == "spike":
            x[-1] = 2 * SPIKE
        x, y = (tensor.chunk(self.size)[self.rank] for tensor in (x, y))
        return Batch({"points": x}, y, len(x), len(x))

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.position += 1
            yield self.batch(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def settings_for(folder: Path, mesh: MeshSettings, zero: int = 0, **tables: Any) -> TrainSettings:
    given = TrainSettings(
        batch=BatchSettings(sequences=ROWS, microbatch=1, sequence=1),
        mesh=mesh,
        memory=MemorySettings(zero=zero),
        pipeline=PipelineSettings(device="cpu", timeout=120.0),
        learning_rate=LearningRateSettings(shape="constant", warmup_steps=0),
        evaluation=EvaluationSettings(every=0),
        checkpoint=CheckpointSettings(at_end=False),
        run=RunSettings(steps=STEPS, out=str(folder), threads=1),
    )
    return replace(given, **tables)


def trained(settings: TrainSettings, bad: str = "", tell: Callable[[Any], None] = lambda told: None) -> TrainResult:
    def make_data(settings: TrainSettings, built: Built, *, rank: int, size: int) -> Data:
        return Data(Points(rank, size, bad), (), 0)

    return run_training(settings, tell=tell, make_model=made_model, make_data=make_data)


# ---- one launch ------------------------------------------------------------------------------------------------------

SKIPPING: dict[str, tuple[MeshSettings, int, str]] = {
    "nan": (DP, 0, "nan"),
    "spike, zero 3": (DP, 3, "spike"),
    "spike, zero 1": (DP, 1, "spike"),
    "spike, tp": (TP, 0, "spike"),
}
GOING_ON: dict[str, tuple[MeshSettings, int]] = {
    "pp4": (PP, 0),
    "dp4": (MeshSettings(pipeline=1, data=4), 3),
    "tp": (TP, 0),
}


def _all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (mesh, zero, bad) in SKIPPING.items():
        result = trained(settings_for(folder / name, mesh, zero), bad)
        found[name] = result.num_skipped, result.losses
    found["stopped"] = _stopped(folder)
    for name, (mesh, zero) in GOING_ON.items():
        again = CheckpointSettings(resume=str(folder / "stopped"), at_end=False)
        steps = RunSettings(steps=found["stopped"][1] + 2, out=str(folder / f"on {name}"), threads=1)
        found[name] = trained(settings_for(folder, mesh, zero, checkpoint=again, run=steps)).losses
    found["balance"] = _balanced()
    found["different"] = _different()
    return found


def _stopped(folder: Path) -> tuple[str, int, list[float]]:
    """Stop a run by a signal to rank 3, once it has made two steps."""
    if os.environ["RANK"] == "3":
        threading.Thread(target=_signal_once, args=(folder / "step-2",), daemon=True).start()
    long = RunSettings(steps=100_000, out=str(folder / "stopped"), threads=1)
    given = settings_for(folder, DP, 1, run=long)
    found = trained(given, tell=lambda told: (folder / f"step-{told.step}").touch() if told.step < 9 else None)
    assert found.stopped is not None
    return found.stopped.stopped, found.stopped.step, found.losses


def _signal_once(file: Path) -> None:
    limit = time.monotonic() + 120
    while not file.exists() and time.monotonic() < limit:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def _balanced() -> tuple[int, ...]:
    """Return the cut of balance="auto", where every rank would measure something else."""
    rank = int(os.environ["RANK"])

    def odd(*args: Any, **kwargs: Any) -> Balance:
        found = balanced(*args, **kwargs)
        return replace(found, partition=replace(found.partition, counts=(1 + rank, 5 - rank)))

    with mock.patch("drumline.pipeline.cutting.balanced", odd):
        model, x, y = made_model(TrainSettings()).model, torch.randn(4, WIDTH), torch.randn(4, 2)
        options: dict[str, Any] = {"num_microbatches": 2, "timeout": 120.0, "balance": "auto"}
        options |= {"example": x, "example_target": y, "loss_fn": nn.functional.mse_loss}
        with dl.Pipeline(model, mesh={"pp": 2, "dp": 2}, **options) as pipe:
            pipe.step(x, target=y)
            assert pipe.balance is not None
            return pipe.balance.counts


def _different() -> str:
    """Return what ranks are told if one of line 1 gets another target than the rest of its line."""
    model, rank = made_model(TrainSettings()).model, int(os.environ["RANK"])
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "num_microbatches": 2, "timeout": 120.0}
    pipe = dl.Pipeline(model, mesh={"pp": 2, "dp": 2}, **options)
    x, y = torch.ones(4, WIDTH), torch.ones(4, 2)
    try:
        pipe.step(x + (rank == 3), target=y)
        pipe.settle()
    except MismatchError as error:
        return str(error)
    except RankFailed as error:
        return f"{error.rank}: {error}"
    return ""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What every one of four ranks has seen."""
    return dl.launch(_all, tmp_path_factory.mktemp("meshes"), num_ranks=4)


def left_out(bad: str, folder: Path, steps: int = STEPS) -> list[float]:
    """Return the losses of one process, which skips the same update."""
    run = RunSettings(steps=steps, out=str(folder), threads=1)
    in_turn = PipelineSettings(device="cpu", transport="in-process")
    return trained(settings_for(folder, ONE, run=run, pipeline=in_turn), bad).losses


@long
def test_all_lines_skip_an_update_together(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    plain = {bad: left_out(bad, tmp_path / bad) for bad in ("nan", "spike")}
    for name, (_, _, bad) in some(SKIPPING.items()):
        for rank in some(ranks):
            skipped, losses = rank[name]
            assert skipped == 1, name
            assert losses == pytest.approx(plain[bad], rel=1e-5, nan_ok=True), name


@long
def test_a_signal_to_one_rank_stops_all_lines_and_any_mesh_goes_on(ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    why, steps, losses = ranks[0]["stopped"]
    assert why == "SIGTERM on rank 3 (pp 1, dp 1)"
    assert all(some(rank["stopped"] == (why, steps, losses) for rank in ranks))
    plain = left_out("", tmp_path / "plain", steps + 2)
    assert losses == pytest.approx(plain[:steps], rel=1e-5)
    for name in some(GOING_ON):
        assert all(some(rank[name] == pytest.approx(plain[steps:], rel=1e-5) for rank in ranks)), name


@pytest.mark.features("capture", "check", "lengths", "mesh", "precision", "record", "saving", "stream")
def test_all_lines_take_the_cut_that_rank_0_measured(ranks: list[dict[str, Any]]) -> None:
    assert all(some(rank["balance"] == (1, 5) for rank in ranks))


def test_errors_of_a_line_name_ranks_by_number_and_place(ranks: list[dict[str, Any]]) -> None:
    of_line_1 = "rank 1 (pp 0, dp 1) and rank 3 (pp 1, dp 1) got different batches"
    for rank in some([1, 3]):
        assert of_line_1 in ranks[rank]["different"]


# ---- ranks that die --------------------------------------------------------------------------------------------------


def fragile(folder: Path, **tables: Any) -> TrainSettings:
    """Return settings of a model whose orders to die lie beside the run."""
    given = settings_for(folder, DP, 1)
    model = ModelSettings(kind="function", function=f"{FRAGILE}:model", arguments={"orders": f"{folder}.orders"})
    save = CheckpointSettings(every=2)
    return replace(given, model=model, data=DataSettings(kind="points"), checkpoint=save, **tables)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@long
def test_ranks_start_again_and_a_data_parallel_pipeline_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, whole = tmp_path / "run", tmp_path / "whole"
    orders = Path(f"{folder}.orders")
    orders.mkdir()
    for name in ("3-0-a", "3-2-b"):
        (orders / name).touch()
    start(fragile(folder, failures=FailureSettings(restarts=3, elastic=True, min_ranks=2)))
    alone = PipelineSettings(device="cpu", transport="in-process")
    start(replace(fragile(whole), mesh=MeshSettings(pipeline=2), memory=MemorySettings(), pipeline=alone))
    found, wanted = ([line["train/loss"] for line in lines(path / "metrics.jsonl")] for path in (folder, whole))
    assert found == pytest.approx(wanted, rel=1e-6)
    assert len(found) == STEPS
    # The first time all four come back; the second time rank 3 does not, and its pipeline is left out.
    # It dies once the checkpoint of step 2 is there; by then that of step 4 may be, too.
    told_of = [(line["step"], line["ranks"]) for line in lines(folder / "restarts.jsonl")]
    assert told_of in ([(0, 4), (2, 2)], [(0, 4), (4, 2)])
    assert "planned for 2 ranks instead of 4; mesh.data = 1, with 8 microbatches each" in caplog.text
    assert "memory.zero = 0, because no other rank can hold a part" in caplog.text
    told = re.findall(r"rank 3 (?:\(pp 1, dp 1\) )?(?:died|was killed|ended)", caplog.text)
    assert told


def test_only_data_parallel_pipelines_are_left_out() -> None:
    def given(**mesh: int) -> TrainSettings:
        batch = BatchSettings(sequences=24, microbatch=1)
        return TrainSettings(mesh=MeshSettings(**mesh), batch=batch, failures=FailureSettings(elastic=True))

    four = given(pipeline=2, data=4)
    assert [most_within(four, number) for number in (7, 6, 5, 3, 1)] == [6, 6, 4, 2, 0]
    assert fewest_of(four) == 2
    two = planned_for(four, 4, quiet=True)
    assert (two.mesh.data, two.mesh.pipeline, two.num_microbatches) == (2, 2, 12)
    both = given(pipeline=2, data=4, tensor=2)
    assert most_within(both, 15) == 12
    with refused(UsageError, "7 ranks are there for data-parallel parts of 2 ranks", expected="a multiple of 2"):
        planned_for(four, 7)
    uneven = replace(four, batch=BatchSettings(sequences=8, microbatch=1))
    assert most_within(uneven, 7) == 4  # three do not divide eight
    for mesh in some([{"mesh.tensor": 2}, {"mesh.context": 2}]):
        with refused(ConfigError, r"failures\.elastic is true, and no data-parallel pipeline"):
            read_settings(None, {"failures.elastic": True, "failures.restarts": 1, **mesh})
