"""A NaN in one microbatch: all ranks leave that update out, and everything else is as if nothing had happened."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import NonFiniteError
from drumline.schedules import schedules
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    FailureSettings,
    OptimizerGroup,
    OptimizerSettings,
    PipelineSettings,
    PrecisionSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.data.items.batch import Batch, Data
from drumline.train.loop.optimizers import Optimizers
from drumline.train.loop.progress import Update
from drumline.train.loop.rates import rate
from drumline.train.loop.run import run_training
from drumline.train.loop.stopping import SkippedUpdate
from drumline.train.loop.training import TrainResult
from drumline.train.models.built import Built
from refused import refused
from some import some

pytestmark = [
    pytest.mark.torch,
    pytest.mark.usefixtures("settled_products"),
    pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream"),
]

ROWS, WIDTH = 8, 4
BAD = 2  # the update with a NaN, from 0
MUON = OptimizerGroup(("*.weight",), kind="Muon", only_matrices=True, lr=0.02)


def settings_for(folder: Path, **tables: Any) -> TrainSettings:
    given = TrainSettings(
        batch=BatchSettings(sequences=ROWS, microbatch=2, sequence=1),
        pipeline=PipelineSettings(transport="in-process", device="cpu", timeout=60),
        optimizer=OptimizerSettings(lr=1e-2, groups=(MUON,)),
        evaluation=EvaluationSettings(every=0),
        run=RunSettings(steps=5, out=str(folder)),
    )
    return replace(given, **tables)


def made_model(settings: TrainSettings, *, device: str = "cpu") -> Built:
    torch.manual_seed(1)
    kind = torch.bfloat16 if settings.precision.weights == "bf16" else torch.float32
    layers = [nn.Linear(WIDTH, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)]
    return Built(nn.Sequential(*layers).to(kind), nn.functional.mse_loss, inputs="points")


class Points:
    """Batches of points; some have a NaN in the input or the target of one microbatch."""

    def __init__(self, settings: TrainSettings, bad: dict[int, str]) -> None:
        self.kind = torch.bfloat16 if settings.precision.weights == "bf16" else torch.float32
        self.rows, self.bad, self.position = settings.num_microbatches * settings.batch.microbatch, bad, 0

    def batch(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(self.rows, WIDTH, generator=generator)
        y = x[:, :2].sin()
        if number in self.bad:
            (x if self.bad[number] == "input" else y)[3] = math.nan
        return Batch({"points": x.to(self.kind)}, y.to(self.kind), self.rows, self.rows)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.position += 1
            yield self.batch(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def trained(settings: TrainSettings, bad: dict[int, str], tell: Any = lambda told: None) -> TrainResult:
    def make_data(settings: TrainSettings, built: Built, *, rank: int, size: int) -> Data:
        return Data(Points(settings, bad), (), 0)

    return run_training(settings, tell=tell, make_model=made_model, make_data=make_data)


def saved(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    newest = max((folder / "checkpoints").iterdir())
    return {name: tensor for file in sorted(newest.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def left_out(settings: TrainSettings, skipped: int) -> dict[str, Any]:
    """Train on data without a NaN by a loop that leaves out one update; returns what it saves."""
    built, stream = made_model(settings), Points(settings, {})
    pipe = dl.Pipeline(
        built.model,
        loss_fn=built.loss_fn,
        num_microbatches=settings.num_microbatches,
        num_ranks=2,
        transport="in-process",
        device="cpu",
        master_weights=settings.precision.master_weights,
    )
    with pipe:
        optimizers = Optimizers(pipe, settings.optimizer)
        for step in range(settings.run.steps):
            for at in range(settings.batch.accumulate):
                batch = stream.batch(step * settings.batch.accumulate + at)
                pipe.step(batch.inputs["points"], target=batch.target, share=1 / settings.batch.accumulate)
            if settings.optimizer.clip_norm:
                pipe.clip_grad_norm_(settings.optimizer.clip_norm)
            optimizers.set_rate(rate(settings.learning_rate, step, settings.run.steps))
            if step != skipped:
                optimizers.step()
            optimizers.zero_grad()
        pipe.save(Path(settings.folder) / "checkpoints", step=settings.run.steps, wait=True)
    return saved(Path(settings.folder))


@pytest.mark.parametrize(
    ("bad", "tables"),
    [
        ({BAD: "input"}, {}),
        ({BAD: "target"}, {"optimizer": OptimizerSettings(lr=1e-2, clip_norm=0.0)}),
        # In the first of three steps: it is noticed when the third begins, which still runs.
        ({3 * BAD: "target"}, {"batch": BatchSettings(sequences=3 * ROWS, microbatch=2, sequence=1, accumulate=3)}),
        ({BAD: "input"}, {"precision": PrecisionSettings(weights="bf16", master_weights=True)}),
    ],
    ids=["clipped", "unclipped", "accumulated", "masters"],
)
def test_a_run_with_a_nan_equals_one_that_leaves_that_update_out(
    tmp_path: Path, bad: dict[int, str], tables: dict[str, Any]
) -> None:
    told: list[Any] = []
    found = trained(settings_for(tmp_path / "nan", **tables), bad, told.append)
    assert (found.num_skipped, [math.isnan(loss) for loss in found.losses].index(True)) == (1, BAD)
    assert [update.step for update in told if isinstance(update, SkippedUpdate)] == [BAD + 1]
    assert [update.num_skipped for update in told if isinstance(update, Update)] == [0, 0, 1, 1, 1]
    expected, actual = left_out(settings_for(tmp_path / "ours", **tables), BAD), saved(tmp_path / "nan")
    assert actual.keys() == expected.keys()
    for name, value in some(expected.items()):
        assert torch.equal(actual[name], value), name
    lines = [json.loads(line) for line in (tmp_path / "nan" / "failures.jsonl").read_text().splitlines()]
    assert [(line["step"], line["in_a_row"]) for line in lines] == [(BAD + 1, 1)]
    assert "NaN or infinite" in lines[0]["skipped"]
    metrics = [json.loads(line) for line in (tmp_path / "nan" / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["train/skipped"] == 1


def test_ranks_of_several_processes_skip_the_same_update_and_stop_after_too_many(tmp_path: Path) -> None:
    few = settings_for(
        tmp_path / "ranks",
        pipeline=PipelineSettings(device="cpu", timeout=60),
        checkpoint=CheckpointSettings(every=2),
        failures=FailureSettings(max_skipped=1),
    )
    alone = trained(settings_for(tmp_path / "alone"), {BAD: "target"})

    def on_a_rank(more: dict[int, str], folder: str) -> tuple[Any, ...]:
        given = replace(few, run=replace(few.run, out=folder))
        try:
            found = trained(given, {BAD: "target", **more})  # only the last rank sees a target
        except NonFiniteError as error:
            return ("ended", str(error))
        return (found.num_skipped, found.losses)

    both = dl.launch(lambda: [on_a_rank({}, f"{few.folder}/a"), on_a_rank({3: "target"}, f"{few.folder}/b")])
    for finished, ended in some(both):
        assert finished[0] == 1
        assert str(finished[1]) == str(alone.losses)
        assert ended[0] == "ended"
        assert "in 2 steps in a row" in ended[1]
        assert "failures.max_skipped" in ended[1]
        assert "continue from" in ended[1]
        assert "checkpoints/step-00000002" in ended[1]
    assert [path.name for path in (tmp_path / "ranks" / "b" / "checkpoints").iterdir()] == ["step-00000002"]


@pytest.mark.parametrize("schedule", [name for name, schedule in schedules().items() if not schedule.flushed])
def test_without_a_flush_a_run_goes_on_after_a_nan_and_counts_it_once(schedule: str, tmp_path: Path) -> None:
    def given(folder: str, **tables: Any) -> TrainSettings:
        unclipped = OptimizerSettings(lr=1e-2, clip_norm=0.0)
        pipeline = PipelineSettings(transport="in-process", device="cpu", schedule=schedule)
        return replace(settings_for(tmp_path / folder), pipeline=pipeline, optimizer=unclipped, **tables)

    told: list[Any] = []
    whole = trained(given("whole"), {BAD: "input"}, told.append)
    assert (whole.num_skipped, [math.isnan(loss) for loss in whole.losses].index(True)) == (1, BAD)
    assert [(update.step, update.in_a_row) for update in told if isinstance(update, SkippedUpdate)] == [(BAD + 1, 1)]
    parts = given("parts", run=RunSettings(steps=BAD + 1, out=str(tmp_path / "parts")))
    first = trained(parts, {BAD: "input"})
    assert first.num_skipped == 1, "the update is due and will be left out"
    resumed = CheckpointSettings(resume=str(tmp_path / "parts"))
    second = trained(given("rest", checkpoint=resumed), {BAD: "input"})
    assert second.num_skipped == 1
    assert str(first.losses + second.losses) == str(whole.losses)
    ours, theirs = saved(tmp_path / "rest"), saved(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    for name, value in some(theirs.items()):
        assert torch.equal(ours[name], value), name
    with refused(NonFiniteError, r"step 3: a loss or gradient on rank 0, 1 .* in 2 steps in a row"):
        trained(given("many", failures=FailureSettings(max_skipped=1)), {1: "input", 2: "input"})


def test_overflows_of_a_loss_scaler_count_too(tmp_path: Path) -> None:
    half = settings_for(tmp_path / "half", precision=PrecisionSettings(compute="fp16"))
    found = trained(half, {BAD: "input"})
    assert found.num_skipped == 1
    assert len(found.losses) == 5
