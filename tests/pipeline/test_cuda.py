"""On a CUDA device: the same gradients, in one process, captured, and on two ranks with host-staged transfers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.core.errors import ModelError, NonFiniteError
from drumline.pipeline.launch import launch
from drumline.pipeline.pipeline import Pipeline
from torch_models import SYNCHRONOUS, TWO_WAYS, Reference, data, mlp, programs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
CUDA = torch.device("cuda")


def compare(program: Any, *, exact: bool, transport: str = "in-process", dropout: float = 0.2, **settings: Any) -> None:
    model = mlp(dropout=dropout).to(CUDA)
    reference = Reference(model, program, functional.mse_loss, device=CUDA)
    with Pipeline(
        model,
        loss_fn=functional.mse_loss,
        schedule=program,
        num_ranks=program.num_ranks,
        transport=transport,
        **settings,
    ) as pipe:
        for step in range(2):
            batch, target = (one.to(CUDA) for one in data(8, seed=step))
            result = pipe.step(batch, target=target)
            expected = reference.step(batch, target)
            assert result.loss is not None
            torch.testing.assert_close(result.loss.to(CUDA), expected, rtol=1e-6, atol=1e-7)
            reference.compare(pipe, exact=exact, tolerance=1e-5)
            pipe.clip_grad_norm_(0.5)
            pipe.zero_grad()
            reference.model.zero_grad()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_gradients_on_the_device_are_those_of_one_process(name: str) -> None:
    for num_ranks in (1, 2, 4):
        for program in programs(name, num_ranks, (4,)):
            for checkpoint in ("none", "full"):
                compare(program, exact=name not in TWO_WAYS, checkpoint=checkpoint)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "interleaved-zb", "looped-bfs"])
def test_captured_steps_give_the_same_gradients(name: str) -> None:
    for program in programs(name, 1, (4,)):
        compare(program, exact=False, dropout=0.0, capture=True)


def test_captured_steps_follow_changing_shapes_and_add_up() -> None:
    (program,) = programs("zb-v", 1, (4,))
    model = mlp().to(CUDA)
    reference = Reference(model, program, functional.mse_loss, device=CUDA)
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, capture=True)
    for rows in (8, 8, 12, 7, 8):
        batch, target = (one.to(CUDA) for one in data(rows, seed=rows))
        pipe.step(batch, target=target)
        reference.step(batch, target)
    reference.compare(pipe, exact=False, tolerance=1e-5)


def test_what_a_graph_could_not_repeat_is_refused() -> None:
    batch, target = (one.to(CUDA) for one in data(8))
    for model, says in (
        (mlp(dropout=0.5), "draws random numbers"),
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), "changes its buffers"),
    ):
        pipe = Pipeline(model.to(CUDA), loss_fn=functional.mse_loss, num_microbatches=4, capture=True)
        with pytest.raises(ModelError, match=says):
            pipe.step(batch, target=target)


def test_a_nan_on_the_device_stops_the_optimizer() -> None:
    for capture in (False, True):
        pipe = Pipeline(mlp().to(CUDA), loss_fn=functional.mse_loss, num_microbatches=4, capture=capture)
        optimizer = pipe.optimizer(torch.optim.Adam)
        batch, target = (one.to(CUDA) for one in data(8))
        pipe.step(batch * float("nan"), target=target)
        with pytest.raises(NonFiniteError):
            optimizer.step()
        assert not optimizer.state


def test_bfloat16_gradients_are_those_of_one_process() -> None:
    for name in ("interleaved-1f1b", "zb-v"):
        (program,) = programs(name, 1, (4,))
        model = mlp().to(CUDA, torch.bfloat16)
        reference = Reference(model, program, functional.mse_loss, device=CUDA)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program)
        batch, target = (one.to(CUDA, torch.bfloat16) for one in data(8))
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False, tolerance=1e-2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe"])
def test_autocast_on_the_device_gives_one_processs_gradients(name: str, precision: str) -> None:
    scale = 2.0**10 if precision == "fp16" else 1.0
    for program in programs(name, 2, (4,)):
        for checkpoint in ("none", "full"):
            model = mlp(dropout=0.2).to(CUDA)
            reference = Reference(model, program, functional.mse_loss, device=CUDA, precision=precision, scale=scale)
            pipe = Pipeline(
                model,
                loss_fn=functional.mse_loss,
                schedule=program,
                num_ranks=2,
                checkpoint=checkpoint,
                precision=precision,
            )
            if pipe.scaler is not None:
                pipe.scaler.scale = scale
            batch, target = (one.to(CUDA) for one in data(8))
            pipe.step(batch, target=target)
            reference.step(batch, target)
            for one in reference.model.parameters():
                assert one.grad is not None
                one.grad /= scale
            reference.compare(pipe, exact=name not in TWO_WAYS, tolerance=1e-5)


def test_captured_autocast_follows_the_weights() -> None:
    (program,) = programs("zb-v", 1, (4,))
    model = mlp().to(CUDA)
    reference = Reference(model, program, functional.mse_loss, device=CUDA, precision="bf16")
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, capture=True, precision="bf16")
    for step in range(3):
        batch, target = (one.to(CUDA) for one in data(8, seed=step))
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False, tolerance=1e-5)
        for one in (model, reference.model):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()


def test_times_are_taken_on_the_device() -> None:
    pipe = Pipeline(mlp().to(CUDA), loss_fn=functional.mse_loss, schedule="zb-v", num_microbatches=4, num_ranks=2)
    batch, target = (one.to(CUDA) for one in data(8))
    pipe.step(batch, target=target)
    pipe.step(batch, target=target)
    timeline = pipe.timeline()
    assert timeline.makespan > 0
    assert all(end >= start for track in timeline.tracks for start, end in zip(track.starts, track.ends, strict=True))


def two_ranks() -> list[str]:
    torch.cuda.set_device(0)
    tried = []
    for name in SYNCHRONOUS:
        for program in programs(name, 2, (2, 6)):
            compare(program, exact=name not in TWO_WAYS, transport="shared-memory", checkpoint=["1", "4"])
            tried.append(name)
    return tried


def test_two_ranks_on_one_device_with_host_staged_transfers() -> None:
    tried = launch(two_ranks, num_ranks=2)
    assert set(tried[0]) == set(SYNCHRONOUS)
