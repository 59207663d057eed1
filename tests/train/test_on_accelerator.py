"""A day on a machine with an accelerator: nobody names a device, and training, resuming and checking run on it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    EvaluationSettings,
    LearningRateSettings,
    MeshSettings,
    OptimizerSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.loop.run import run_training
from drumline.train.start import with_device
from torch_models import mlp, on_meta
from train.training import Writer, cosine, made, plain_run, uneven

pytestmark = [
    pytest.mark.torch,
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator here"),
]


def settings(folder: Path) -> TrainSettings:
    return TrainSettings(
        batch=BatchSettings(sequences=16, microbatch=2, sequence=6, accumulate=2),
        mesh=MeshSettings(pipeline=1),
        pipeline=PipelineSettings(schedule="interleaved-1f1b", stages_per_rank=2, timeout=60),
        optimizer=OptimizerSettings(kind="AdamW", lr=3e-3, clip_norm=0.5),
        learning_rate=LearningRateSettings(shape="cosine", warmup_steps=2, final=0.1),
        evaluation=EvaluationSettings(every=3),
        checkpoint=CheckpointSettings(every=3),
        run=RunSettings(steps=6, seed=3, out=str(folder)),
    )


def adam(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=3e-3)]


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream")
def test_training_takes_the_accelerator_and_learns_as_a_plain_loop_does(tmp_path: Path) -> None:
    given = with_device(settings(tmp_path / "run"))
    found = run_training(given, tell=lambda told: None, make_model=made(Writer), make_data=uneven)
    torch.manual_seed(3)
    losses, norms, held_out = plain_run(Writer(), given, adam, lambda step: cosine(step, 6, 2, 0.1))
    here = torch.accelerator.current_accelerator()
    assert here is not None
    assert given.pipeline.device == here.type
    assert torch.accelerator.max_memory_allocated() > 0
    assert found.losses == pytest.approx(losses, rel=1e-4)
    assert found.grad_norms == pytest.approx(norms, rel=1e-3)
    assert found.evaluations[-1].loss == pytest.approx(held_out, rel=1e-4)


def test_more_ranks_than_accelerators_share_them(tmp_path: Path) -> None:
    many = replace(settings(tmp_path), mesh=MeshSettings(pipeline=torch.accelerator.device_count() + 1))
    here = torch.accelerator.current_accelerator()
    assert here is not None
    assert with_device(many).pipeline.device == here.type


def test_a_model_without_memory_is_made_where_it_will_compute() -> None:
    here = torch.accelerator.current_accelerator()
    assert here is not None
    pipe = dl.Pipeline(on_meta(mlp), loss_fn=nn.functional.mse_loss, num_microbatches=2, num_ranks=2)
    assert {param.device.type for param in pipe.parameters()} == {here.type}


@pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream")
def test_the_command_line_trains_resumes_and_verifies_on_the_accelerator(tmp_path: Path) -> None:
    def drumline(*words: str) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", "drumline", *words], capture_output=True, text=True, timeout=240, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    here = torch.accelerator.current_accelerator()
    assert here is not None
    run = tmp_path / "run"
    small = ["--ranks", "1", "--save-every", "2", "--batch", "8", "--microbatches", "2", "--sequence", "32"]
    told = json.loads(drumline("train", *small, "--steps", "4", "--out", str(run), "--json"))
    assert len(told["losses"]) == 4
    assert json.loads((run / "settings.json").read_text())["pipeline"]["device"] == here.type
    resumed = json.loads(drumline("train", *small, "--steps", "6", "--resume", str(run), "--json"))
    assert resumed["first_step"] == 4
    assert json.loads(drumline("verify", "1f1b", "--json"))["passes"]
