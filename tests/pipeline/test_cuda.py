"""On a CUDA device: the same gradients, in one process, captured, and on two ranks with host-staged transfers."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.launch.launch import launch
from drumline.core.errors import ModelError, NonFiniteError
from drumline.engine.state.materialise import materialise
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from torch_models import SYNCHRONOUS, TWO_WAYS, Reference, data, mlp, on_meta, programs

pytestmark = [
    pytest.mark.torch,
    pytest.mark.accelerator,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
    pytest.mark.features("capture"),
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
            batch, target = (tensor.to(CUDA) for tensor in data(8, seed=step))
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


def compare_captured(program: Any, rows: Sequence[int], transport: str = "in-process", **settings: Any) -> None:
    """Take steps with captured stretches and action by action, and compare every bit."""
    model = mlp().to(CUDA)
    settings |= {"loss_fn": functional.mse_loss, "schedule": program, "num_ranks": program.num_ranks}
    with (
        Pipeline(copy.deepcopy(model), transport=transport, capture=True, **settings) as captured,
        Pipeline(model, transport=transport, **settings) as plain,
    ):
        for step, count in enumerate(rows):
            batch, target = (tensor.to(CUDA) for tensor in data(count, seed=step))
            mine, theirs = (pipe.step(batch, target=target).loss for pipe in (captured, plain))
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine, theirs), f"the loss of step {step} of {program!r}"
            expected = dict(plain.named_parameters())
            for name, param in captured.named_parameters():
                wanted = expected[name].grad
                assert param.grad is not None
                assert wanted is not None
                assert torch.equal(param.grad, wanted), f"{name} in step {step} of {program!r}"
            if step % 3 == 2:  # gradients add up over steps, too
                captured.zero_grad()
                plain.zero_grad()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_captured_steps_give_the_same_bits(name: str) -> None:
    for num_ranks in (1, 2, 4):
        for program in programs(name, num_ranks, (4,)):
            for checkpoint in ("none", "full"):
                compare_captured(program, (8, 8, 8, 8), checkpoint=checkpoint)


def test_captured_steps_follow_changing_shapes() -> None:
    for name, num_ranks in (("zb-v", 1), ("zb-v", 2), ("1f1b", 2), ("dualpipe", 2)):
        (program,) = programs(name, num_ranks, (4,))
        compare_captured(program, (8, 8, 12, 7, 7, 7, 8, 8, 8))


def test_merged_weight_gradients_are_captured() -> None:
    (program,) = programs("zb-h1", 2, (4,))
    compare_captured(program, (8, 8, 8, 8), merge_weight_gradients=True)


def test_captured_gradients_are_those_of_one_process() -> None:
    for num_ranks in (1, 2):
        (program,) = programs("zb-v", num_ranks, (4,))
        model = mlp().to(CUDA)
        reference = Reference(model, program, functional.mse_loss, device=CUDA)
        pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=num_ranks, capture=True)
        for rows in (8, 8, 8, 12, 7, 8):
            batch, target = (tensor.to(CUDA) for tensor in data(rows, seed=rows))
            pipe.step(batch, target=target)
            reference.step(batch, target)
        reference.compare(pipe, exact=False, tolerance=1e-5)


def test_captured_steps_leak_nothing() -> None:
    for num_ranks in (1, 2):
        pipe = Pipeline(
            mlp().to(CUDA), loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=num_ranks, capture=True
        )
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01)
        batch, target = (tensor.to(CUDA) for tensor in data(8))
        held = []
        for _ in range(30):
            pipe.step(batch, target=target)
            optimizer.step()
            optimizer.zero_grad()
            held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert held[9] == held[-1]


def test_captured_messages_do_not_stay_in_memory() -> None:
    """What a step holds in flight does not grow with its microbatches under 1F1B, captured or not."""
    held = []
    for num_microbatches in (8, 32):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2))).to(CUDA)
        pipe = Pipeline(
            model, loss_fn=functional.mse_loss, num_microbatches=num_microbatches, num_ranks=2, capture=True
        )
        batch, target = torch.randn(2, num_microbatches * 4096, 256, device=CUDA)  # 4 MiB a microbatch
        pipe.step(batch, target=target)
        pipe.settle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        for _ in range(3):
            pipe.step(batch, target=target)
        pipe.settle()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        copies = 2 * batch.numel() * batch.element_size()  # of batch and target
        held.append(torch.cuda.memory_reserved() - before - copies)
    assert held[1] <= held[0] + 32 * 2**20


class Reads(nn.Module):
    """Makes the host wait for the device."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.sum().item()


def test_what_a_graph_could_not_repeat_is_refused() -> None:
    batch, target = (tensor.to(CUDA) for tensor in data(8))
    for model, says in (
        (mlp(dropout=0.5), "draws random numbers"),
        (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), "changes its buffers"),
        (nn.Sequential(nn.Linear(6, 6), Reads()), "cannot be captured"),
    ):
        for num_ranks in (1, 2):
            pipe = Pipeline(
                copy.deepcopy(model).to(CUDA),
                loss_fn=functional.mse_loss,
                num_microbatches=4,
                num_ranks=num_ranks,
                capture=True,
            )
            if "cannot be captured" in says:
                pipe.step(batch, target=target)  # the first step runs as ever
            with refused(ModelError, says):
                pipe.step(batch, target=target)
    (program,) = programs("1f1b", 2, (4,))
    compare_captured(program, (8, 8, 8))  # the device is none the worse for it


def test_a_nan_on_the_device_stops_the_optimizer() -> None:
    for capture in (False, True):
        pipe = Pipeline(mlp().to(CUDA), loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=2, capture=capture)
        optimizer = pipe.optimizer(torch.optim.Adam)
        batch, target = (tensor.to(CUDA) for tensor in data(8))
        for _ in range(3):
            pipe.step(batch, target=target)
            pipe.zero_grad()
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
        batch, target = (tensor.to(CUDA, torch.bfloat16) for tensor in data(8))
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False, tolerance=1e-2)


@pytest.mark.features("precision")
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
            batch, target = (tensor.to(CUDA) for tensor in data(8))
            pipe.step(batch, target=target)
            reference.step(batch, target)
            for param in reference.model.parameters():
                assert param.grad is not None
                param.grad /= scale
            reference.compare(pipe, exact=name not in TWO_WAYS, tolerance=1e-5)


def test_captured_autocast_follows_the_weights() -> None:
    (program,) = programs("zb-v", 1, (4,))
    model = mlp().to(CUDA)
    reference = Reference(model, program, functional.mse_loss, device=CUDA, precision="bf16")
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, capture=True, precision="bf16")
    for step in range(3):
        batch, target = (tensor.to(CUDA) for tensor in data(8, seed=step))
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False, tolerance=1e-5)
        for sequential in (model, reference.model):
            torch.optim.SGD(sequential.parameters(), lr=0.1).step()
            sequential.zero_grad()


@pytest.mark.features("record")
def test_times_are_taken_on_the_device() -> None:
    pipe = Pipeline(mlp().to(CUDA), loss_fn=functional.mse_loss, schedule="zb-v", num_microbatches=4, num_ranks=2)
    batch, target = (tensor.to(CUDA) for tensor in data(8))
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


def two_captured_ranks(transport: str) -> list[str]:
    torch.cuda.set_device(0)
    tried = []
    for name in SYNCHRONOUS:
        for program in programs(name, 2, (6,)):
            compare_captured(program, (8, 8, 8, 7, 7, 7), transport, checkpoint=["1", "4"])
            tried.append(name)
    return tried


@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_two_captured_ranks_on_one_device_with_host_staged_transfers(transport: str) -> None:
    tried = launch(two_captured_ranks, transport, num_ranks=2)
    assert set(tried[0]) == set(SYNCHRONOUS)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
@pytest.mark.parametrize("from_files", [True, False])
def test_a_model_without_memory_is_read_or_drawn_on_the_device(tmp_path: Path, name: str, from_files: bool) -> None:
    if from_files:
        torch.save(mlp().state_dict(), tmp_path / "pytorch_model.bin")
    folder = tmp_path if from_files else None
    (program,) = programs(name, 2, (4,))
    torch.manual_seed(1)  # as making the model does
    state = torch.cuda.get_rng_state()
    whole = materialise(on_meta(mlp), folder)
    assert {param.device.type for param in whole.parameters()} == {"cuda"}
    with Pipeline(
        on_meta(mlp), loss_fn=functional.mse_loss, schedule=program, num_ranks=2, transport="in-process", weights=folder
    ) as pipe:
        assert torch.equal(torch.cuda.get_rng_state(), state)
        wanted = dict((mlp() if from_files else whole).named_parameters())
        for path, param in pipe.named_parameters():
            assert param.device.type == "cuda"
            assert torch.equal(param.cpu(), wanted[path].cpu()), path
        reference = Reference(whole, program, functional.mse_loss, device=CUDA)
        batch, target = (tensor.to(CUDA) for tensor in data(8))
        pipe.step(batch, target=target)
        reference.step(batch, target)
        reference.compare(pipe, exact=False, tolerance=1e-5)
