"""Low precision: one process's gradients to the last bit, one decision of all ranks, float32 sums and masters."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.launch.launch import launch
from drumline.core.errors import MismatchError, ModelError, NonFiniteError, RunError
from drumline.pipeline.pipeline import Pipeline
from matrices import chosen, long, matrix
from refused import refused
from some import some
from torch_models import TWO_WAYS, Reference, data, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.features("precision")]
SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe")
SCALE = 2.0**10


def unscaled(reference: Reference, scale: float) -> None:
    for param in reference.model.parameters():
        assert param.grad is not None
        param.grad /= scale


def compared(
    model: nn.Sequential, program: Any, *, precision: str, exact: bool, transport: str = "in-process", **more: Any
) -> None:
    """Run two steps that add up and compare loss and gradients after each."""
    masters = more.get("master_weights", False)
    scale = SCALE if precision == "fp16" else 1.0
    reference = Reference(model, program, functional.mse_loss, precision=precision, scale=scale, master_weights=masters)
    with Pipeline(
        model,
        loss_fn=functional.mse_loss,
        schedule=program,
        num_ranks=program.num_ranks,
        precision=precision,
        transport=transport,
        **more,
    ) as pipe:
        if pipe.scaler is not None:
            pipe.scaler.scale = SCALE
        for step in range(2):
            batch, target = data(11, seed=step)
            result = pipe.step(batch, target=target)
            loss = reference.step(batch, target)
            assert result.loss is not None
            assert result.loss.dtype is torch.float32
            assert torch.equal(result.loss, loss)
            pipe.settle()
        unscaled(reference, scale)
        for param in pipe.parameters():
            assert param.grad is not None
            assert param.grad.dtype is torch.float32
        reference.compare(pipe, exact=exact)


@matrix("name, precision, num_ranks", SCHEDULES, ("bf16", "fp16"), (2, 4), times=1)
def test_loss_and_gradients_are_those_of_one_process(name: str, precision: str, num_ranks: int) -> None:
    tried = 0
    for program in programs(name, num_ranks, (4, 8)):
        for checkpoint in ("none", "full", ["1", "2", "6"]):
            compared(mlp(dropout=0.2), program, precision=precision, exact=name not in TWO_WAYS, checkpoint=checkpoint)
            tried += 1
    assert tried


def on_real_ranks(transport: str) -> list[str]:
    tried = []
    for name in SCHEDULES:
        for program in programs(name, 2, (4,)):
            for precision in ("bf16", "fp16"):
                compared(
                    mlp(dropout=0.2),
                    program,
                    precision=precision,
                    exact=name not in TWO_WAYS,
                    transport=transport,
                    checkpoint=["1"],
                )
                tried.append(name)
            compared(low(), program, precision="fp32", exact=name not in TWO_WAYS, master_weights=True)
    return tried


@long
@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_real_ranks_give_one_processs_gradients(transport: str) -> None:
    tried = launch(on_real_ranks, transport, num_ranks=2)
    assert set(tried[0]) == set(SCHEDULES)


def pipeline(model: nn.Sequential | None = None, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {
        "loss_fn": functional.mse_loss,
        "schedule": "zb-h1",
        "num_microbatches": 4,
        "num_ranks": 2,
        "precision": "bf16",
        **settings,
    }
    return Pipeline(mlp() if model is None else model, **given)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_parameters_follow_one_process_over_several_clipped_steps(name: str) -> None:
    (program,) = programs(name, 2, (4,))
    model = mlp(dropout=0.2)
    reference = Reference(model, program, functional.mse_loss, precision="bf16")
    pipe = pipeline(model, schedule=program)
    ours = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    theirs = torch.optim.AdamW(reference.model.parameters(), lr=1e-2)
    for step in range(3):
        batch, target = data(9, seed=step)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        norms = pipe.clip_grad_norm_(0.1), nn.utils.clip_grad_norm_(reference.model.parameters(), 0.1)
        torch.testing.assert_close(*norms)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(reference.model.named_parameters())
    for key, param in pipe.named_parameters():
        if name in TWO_WAYS:
            torch.testing.assert_close(param, expected[key], msg=key)
        else:
            assert torch.equal(param, expected[key]), key


@pytest.mark.features("record")
def test_messages_travel_in_the_type_that_the_block_made() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    batch, target = data(8)
    for precision, size in (("fp32", 4), ("bf16", 2), ("fp16", 2)):
        pipe = pipeline(copy.deepcopy(model), precision=precision)
        pipe.step(batch, target=target)
        assert {transfer.num_bytes for transfer in pipe.timeline().transfers} == {2 * 6 * size}


@pytest.mark.features("record")
def test_weights_are_cast_once_a_step_and_not_for_every_microbatch() -> None:
    pipe = pipeline(mlp(2), schedule="gpipe", num_ranks=1, weigh=True)
    batch, target = data(8)
    pipe.step(batch, target=target)
    stash = pipe.timeline().stash
    assert stash is not None
    first, second, *_ = (after - before for before, after in zip((0, *stash[0]), stash[0], strict=False))
    assert first - second == 6 * 6 * 2  # one weight, of the layer whose input wants a gradient
    assert stash[0][-1] == 0


class Branched(nn.Module):
    """Uses its input three times, so that three gradients of it are added."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.one(x).tanh() + self.two(x)
        return found


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_cut_does_not_change_how_gradients_of_a_float32_input_are_added(checkpoint: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(6), *(Branched() for _ in range(4)))  # which returns float32
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    plain = copy.deepcopy(model)
    for rows, target in zip(x.chunk(2), y.chunk(2), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.mse_loss(plain(rows), target) / 2
        loss.backward()  # type: ignore[no-untyped-call]
    for balance in some([[1, 4], [2, 3], [4, 1]]):
        pipe = Pipeline(
            copy.deepcopy(model), loss_fn=functional.mse_loss, num_microbatches=2, num_ranks=2, balance=balance,
            precision="bf16", checkpoint=checkpoint, transport="in-process",
        )  # fmt: skip
        pipe.step(x, target=y)
        for param, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert param.grad is not None
            assert other.grad is not None
            assert torch.equal(param.grad, other.grad)


def test_casts_of_weights_do_not_outlive_a_step() -> None:
    model = mlp()
    pipe = pipeline(model)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=10.0)
    batch, target = data(8)
    before = pipe.eval_step(batch).output
    pipe.step(batch, target=target)
    optimizer.step()
    after = pipe.eval_step(batch).output
    assert not torch.equal(before, after)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.eval()
        expected = torch.cat([model(part) for part in batch.chunk(4)])
    assert after.dtype is torch.bfloat16
    assert torch.equal(after, expected.detach())


def test_blocks_are_measured_in_the_precision_that_they_will_have() -> None:
    batch, target = data(8)
    for precision, size in (("fp32", 4), ("bf16", 2)):
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        pipe = pipeline(model, precision=precision, example=batch, example_target=target)
        assert pipe.balance is not None
        assert {layer.output_bytes for layer in pipe.balance.profile.layers[:-1]} == {2 * 6 * size}


class Hot(nn.Module):
    """Makes its input so large that the gradient of its weight overflows in float16, and only that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.size = nn.Linear(6, 6), 1.0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.layer(x.detach() * self.size)  # its input's own gradient passes by
        return x + made - (made * (1.0 - 1.0 / self.size)).detach()


def hot(at: int) -> nn.Sequential:
    torch.manual_seed(0)
    blocks: list[nn.Module] = [nn.Linear(6, 6) for _ in range(4)]
    blocks[at] = Hot()
    return nn.Sequential(*blocks)


def made_hot(model: nn.Module, size: float) -> None:
    for module in model.modules():
        if isinstance(module, Hot):
            module.size = size


def overflows(transport: str) -> list[dict[str, Any]]:
    """Overflow on the first stage only, and again on the last; return what this process saw of each."""
    return [overflows_on(stage, transport) for stage in (0, 1)]


def overflows_on(stage: int, transport: str) -> dict[str, Any]:
    model = hot(-stage)
    with pipeline(model, precision="fp16", transport=transport) as pipe:
        assert pipe.scaler is not None
        pipe.scaler.scale = 2.0**15
        optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-2)
        batch, target = data(8)
        made_hot(model, 1e3)
        pipe.step(batch, target=target)
        finite = [bool(param.grad.isfinite().all()) for param in pipe.parameters() if param.grad is not None]
        before = [param.detach().clone() for param in pipe.parameters()]
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        kept = all(torch.equal(tensor, other) for tensor, other in zip(before, pipe.parameters(), strict=True))
        states, halved = len(optimizer.state), pipe.scaler.scale
        optimizer.zero_grad()
        made_hot(model, 1.0)
        pipe.step(batch, target=target)
        optimizer.step()
        moved = not any(torch.equal(tensor, other) for tensor, other in zip(before, pipe.parameters(), strict=True))
        return {
            "finite": finite,
            "kept": kept,
            "states": states,
            "halved": halved,
            "moved": moved,
            "scale": pipe.scaler.scale,
        }


@pytest.mark.parametrize("transport", ["in-process", "shared-memory", "gloo"])
def test_an_overflow_on_one_stage_makes_all_ranks_skip(transport: str) -> None:
    told = [overflows(transport)] if transport == "in-process" else launch(overflows, transport, num_ranks=2)
    for stage in (0, 1):
        seen = [row[stage] for row in told]
        finite = [all(some(entry["finite"])) for entry in seen]
        assert finite == ([False] if len(seen) == 1 else [rank != stage for rank in (0, 1)]), "on one rank only"
        for entry in some(seen):
            assert entry["kept"]
            assert entry["states"] == 0
            assert entry["halved"] == entry["scale"] == 2.0**14
            assert entry["moved"]


def test_the_scale_grows_and_falls_as_torchs_does() -> None:
    pipe = pipeline(precision="fp16")
    assert pipe.scaler is not None
    torchs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    theirs = nn.Parameter(torch.ones(2))
    plain = torch.optim.SGD([theirs], lr=0.0)
    torchs.scale(theirs.sum())
    pipe.scaler.load_state_dict(torchs.state_dict())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1e-3)
    batch, target = data(8)
    for bad in (False, False, False, True, False, True, False, False, False, False, False, False):
        pipe.step(batch * (float("inf") if bad else 1.0), target=target)
        optimizer.step()
        optimizer.zero_grad()
        theirs.grad = torch.full((2,), float("inf") if bad else 1.0)
        torchs.step(plain)
        torchs.update()
        assert pipe.scaler.state_dict() == torchs.state_dict()
    assert pipe.scaler.scale == 128.0


def test_several_optimizers_share_one_decision() -> None:
    pipe = pipeline(precision="fp16")
    assert pipe.scaler is not None
    both = [pipe.optimizer(torch.optim.SGD, lr=1e-3) for _ in range(2)]
    batch, target = data(8)
    pipe.step(batch * float("inf"), target=target)
    before = [param.detach().clone() for param in pipe.parameters()]
    for optimizer in both:
        optimizer.step()
    assert pipe.scaler.scale == 2.0**15
    assert all(torch.equal(tensor, other) for tensor, other in zip(before, pipe.parameters(), strict=True))


def test_gradients_that_were_dropped_do_not_count_as_an_overflow() -> None:
    pipe = pipeline(precision="fp16")
    assert pipe.scaler is not None
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1e-3)
    batch, target = data(8)
    for drop in (pipe.zero_grad, optimizer.zero_grad):
        pipe.step(batch * float("inf"), target=target)
        drop()
        before = [param.detach().clone() for param in pipe.parameters()]
        pipe.step(batch, target=target)
        optimizer.step()
        assert not any(torch.equal(tensor, other) for tensor, other in zip(before, pipe.parameters(), strict=True))
        optimizer.zero_grad()
    assert pipe.scaler.scale == 2.0**16


def test_a_scale_that_has_fallen_to_its_floor_is_an_error() -> None:
    pipe = pipeline(precision="fp16")
    assert pipe.scaler is not None
    pipe.scaler.floor = 2.0**14
    optimizer = pipe.optimizer(torch.optim.SGD, lr=1e-3)
    batch, target = data(8)
    for _ in range(2):
        pipe.step(batch * float("nan"), target=target)
        optimizer.step()
        optimizer.zero_grad()
    pipe.step(batch * float("nan"), target=target)
    with refused(NonFiniteError, "and the loss scale is already down to 16384"):
        optimizer.step()
    with refused(NonFiniteError, "and the loss scale is already down to 16384"):
        optimizer.step()  # as long as the gradients are there
    optimizer.zero_grad()
    pipe.step(batch, target=target)
    optimizer.step()


@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"precision": "fp32", "master_weights": True}])
def test_a_plain_optimizer_is_refused_where_it_would_do_harm(settings: Any) -> None:
    pipe = pipeline(**settings)
    plain = torch.optim.SGD(pipe.parameters(), lr=0.1)
    pipe.step(*data(8)[:1], target=data(8)[1])
    with refused(RunError, fix=r"use pipe.optimizer\(torch.optim.SGD"):
        plain.step()
    with refused(RunError, "a closure"):
        pipe.optimizer(torch.optim.SGD, lr=0.1).step(lambda: 0.0)


def test_schedulers_take_the_optimizer_as_torchs_own() -> None:
    pipe = pipeline(precision="fp16")
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    assert type(optimizer) is torch.optim.AdamW
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    batch, target = data(8)
    for factor in (float("inf"), 1.0, 1.0):
        pipe.step(batch * factor, target=target)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    assert optimizer.state_dict()["state"]["0.0.weight"]["step"] == 2
    other = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    other.load_state_dict(optimizer.state_dict())


# ---- parameters in low precision -------------------------------------------------------------------------------------


class Up(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Down(nn.Module):
    def __init__(self, kind: torch.dtype) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.kind)


def low(dropout: float = 0.0, *, seed: int = 1, kind: torch.dtype = torch.bfloat16) -> nn.Sequential:
    return nn.Sequential(Down(kind), *mlp(dropout=dropout, seed=seed).to(kind), Up())


@matrix("name, num_ranks", SCHEDULES, (2, 4), times=1)
def test_low_parameters_have_gradients_summed_in_float32(name: str, num_ranks: int) -> None:
    for program, checkpoint in chosen(programs(name, num_ranks, (4, 8)), ("none", "full"), times=1):
        compared(
            low(0.2),
            program,
            precision="fp32",
            exact=name not in TWO_WAYS,
            master_weights=True,
            checkpoint=checkpoint,
        )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_masters_take_updates_that_are_too_small_for_the_parameters(name: str, precision: str) -> None:
    (program,) = programs(name, 2, (4,))
    model = low(kind=torch.bfloat16 if precision == "fp32" else torch.float16)
    masters = {key: param.detach().float().requires_grad_() for key, param in model.named_parameters()}
    theirs = torch.optim.AdamW(masters.values(), lr=1e-5, weight_decay=0.0)
    scale = SCALE if precision == "fp16" else 1.0
    reference = Reference(model, program, functional.mse_loss, precision=precision, master_weights=True, scale=scale)
    pipe = pipeline(model, schedule=program, precision=precision, master_weights=True)
    if pipe.scaler is not None:
        pipe.scaler.scale = SCALE
    ours = pipe.optimizer(torch.optim.AdamW, lr=1e-5, weight_decay=0.0)
    start = [param.detach().clone() for param in model.parameters()]
    for step in range(4):
        batch, target = data(8, seed=step)
        pipe.step(batch, target=target)
        reference.step(batch, target)
        unscaled(reference, scale)
        for key, param in reference.model.named_parameters():
            masters[key].grad = param.grad
        theirs.step()
        ours.step()
        ours.zero_grad()
        assert all(param.grad is None for param in model.parameters())
        with torch.no_grad():
            for key, param in reference.model.named_parameters():
                param.copy_(masters[key])
                param.grad = None
    found = dict(pipe.named_master_weights())
    for key, master in some(found.items()):
        assert master.dtype is torch.float32
        if name in TWO_WAYS:
            torch.testing.assert_close(master, masters[key])
        else:
            assert torch.equal(master, masters[key]), key
    for (key, parameter), before in zip(model.named_parameters(), start, strict=True):
        assert torch.equal(parameter, found[key].to(parameter.dtype))
        if key == "1.1.weight":  # ones: a step of 1e-5 is lost on them in low precision
            assert torch.equal(parameter, before)
            assert not torch.equal(found[key], before.float())


def test_masters_take_over_what_others_do_to_the_parameters() -> None:
    model = low()
    pipe = pipeline(model, precision="fp32", master_weights=True)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.0)
    other = low(seed=7)
    model.load_state_dict(other.state_dict())
    pipe.step(data(8)[0], target=data(8)[1])
    optimizer.step()
    for param, wanted in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, wanted)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_bad_precisions_are_refused() -> None:
    with refused(ModelError, "precision is 'bf61'", fix="did you mean bf16"):
        pipeline(precision="bf61")
    with refused(ModelError, r"has parameters in torch\.bfloat16"):
        pipeline(low(), precision="fp16")
    scaler = pipeline(precision="fp16").scaler
    assert scaler is not None
    with refused(ModelError, "lacks _growth_tracker"):
        scaler.load_state_dict({"scale": 1.0})


def disagree(what: str) -> str:
    rank = int(os.environ["RANK"])
    try:
        with pipeline(precision="bf16" if rank and what == "precision" else "fp16", num_ranks=2) as pipe:
            assert pipe.scaler is not None
            pipe.scaler.scale = 2.0**rank
            pipe.step(data(8)[0], target=data(8)[1])
            pipe.settle()
    except MismatchError as error:
        return str(error)
    return "fine"


def test_ranks_that_disagree_are_told() -> None:
    for what, says in (("precision", "disagree on precision"), ("scale", "ranks scaled the loss by 1, 2")):
        assert all(says in name for name in launch(disagree, what, num_ranks=2))
