"""Updates that all ranks validate afterwards: taken back, they leave the bits of one process that clips or skips."""

from __future__ import annotations

import copy
import gc
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import drumline as dl
import tied_models
from attached import validation_of
from drumline.core.errors import NonFiniteError, RankFailed, RunError, UsageError
from drumline.features.validated.validated import Validation
from drumline.model.block import blocks_of
from drumline.model.blocks.cut import cut
from drumline.model.randomness import Randomness
from drumline.pipeline.pipeline import Pipeline
from drumline.schedules import generate
from matrices import ALL, long, matrix
from reference_step import reference_step
from refused import refused
from some import some
from torch_models import CPU, SYNCHRONOUS, TWO_WAYS, WIDTH, data, mlp

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("settled_products"), pytest.mark.features("validated")]

Make = Callable[[list[nn.Parameter]], list[Optimizer]]
STEPS, LARGE = 7, 400.0  # a target of that size has gradients that must be clipped
MOST = 10.0
HOW: dict[str, Any] = {"validated": "after", "max_norm": MOST}
NO_RANK_ALONE = 6.6  # no rank alone has so large a norm in the step that is too large, and all together have


def muon_and_adam(pipe: Pipeline, **how: Any) -> list[Optimizer]:
    return [
        pipe.optimizer(torch.optim.Muon, names="*.0.weight", lr=0.02, **how),
        pipe.optimizer(torch.optim.AdamW, names=["*.bias", "*.1.weight"], lr=0.01, **how),
    ]


def matching(model: nn.Module, *, matrices: bool) -> list[nn.Parameter]:
    return [param for name, param in model.named_parameters() if name.endswith("0.weight") is matrices]


OPTIMIZERS: dict[str, tuple[Callable[..., list[Optimizer]], Callable[[nn.Module], list[Optimizer]]]] = {
    "sgd": (
        lambda pipe, **how: [pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, **how)],
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    ),
    "adamw": (
        lambda pipe, **how: [pipe.optimizer(torch.optim.AdamW, lr=0.01, amsgrad=True, **how)],
        lambda model: [torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True)],
    ),
    "muon": (
        muon_and_adam,
        lambda model: [
            torch.optim.Muon([param for name, param in model.named_parameters() if name.endswith("0.weight")], lr=0.02),
            torch.optim.AdamW(
                [param for name, param in model.named_parameters() if not name.endswith("0.weight")], lr=0.01
            ),
        ],
    ),
    "asgd": (
        lambda pipe, **how: [pipe.optimizer(torch.optim.ASGD, lr=0.05, **how)],
        lambda model: [torch.optim.ASGD(model.parameters(), lr=0.05)],
    ),
}
# Two copies of a stage add their gradients in another order than one process: see the other cases.
SCHEDULES = [name for name in SYNCHRONOUS if name not in TWO_WAYS] if ALL else ["1f1b", "zb-h2", "zb-v"]


def batches(wrong: dict[int, float]) -> list[tuple[Tensor, Tensor]]:
    """Return a batch for each step; `wrong` says by what the target of a step is multiplied."""
    found = []
    for step in range(STEPS):
        batch, target = data(8, seed=step)
        found.append((batch, target * wrong.get(step, 1.0)))
    return found


@contextmanager
def ahead() -> Iterator[None]:
    """Let ranks of one process update although their own norms speak against it, as if others had the large ones."""
    with mock.patch.object(Validation, "_may_stand", return_value=True):
        yield


def validated(
    model: nn.Module, given: list[tuple[Any, Any]], make: Callable[..., list[Optimizer]], **settings: Any
) -> Pipeline:
    """Train with updates that run ahead of their verdict."""
    pipe = Pipeline(model, **{"loss_fn": functional.mse_loss, "transport": "in-process", **settings})
    optimizers = make(pipe, **HOW)
    with ahead():
        for batch, target in given:
            pipe.step(batch, target=target)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        pipe.settle()
    return pipe


def synchronised(
    model: nn.Module, given: list[tuple[Any, Any]], make: Callable[..., list[Optimizer]], **settings: Any
) -> Pipeline:
    """Train with updates that wait for the norm of all gradients."""
    pipe = Pipeline(model, **{"loss_fn": functional.mse_loss, "transport": "in-process", **settings})
    optimizers = make(pipe)
    for batch, target in given:
        pipe.step(batch, target=target)
        try:
            pipe.clip_grad_norm_(MOST)
            for optimizer in optimizers:
                optimizer.step()
        except NonFiniteError:
            pass
        pipe.zero_grad()
    return pipe


def one_process(
    model: nn.Sequential, given: list[tuple[Tensor, Tensor]], make: Callable[[nn.Module], list[Optimizer]], name: str
) -> list[float]:
    """Train the unsplit model, clip by torch's own function, and skip what is not finite; return the norms."""
    program = generate(name, num_ranks=2, num_microbatches=4)
    stages = cut(blocks_of(model), program.num_stages)
    randomness, optimizers, norms = Randomness(0, CPU), make(model), []
    for step, (batch, target) in enumerate(given):
        randomness.step = step
        reference_step(stages, program, batch, target, functional.mse_loss, randomness)
        norm = nn.utils.clip_grad_norm_(model.parameters(), MOST)
        norms.append(norm.item())
        for optimizer in optimizers:
            if norm.isfinite():
                optimizer.step()
            optimizer.zero_grad()
    return norms


def assert_same(pipe: Pipeline, wanted: dict[str, Tensor]) -> None:
    for name, param in some(pipe.named_parameters()):
        assert torch.equal(param, wanted[name]), name


@matrix("name, kind", SCHEDULES, OPTIMIZERS, times=1)
def test_a_rollback_at_a_random_step_leaves_the_bits_of_one_process(name: str, kind: str) -> None:
    make, plain = OPTIMIZERS[kind]
    clipped, skipped = random.Random(f"{name} {kind}").sample(range(STEPS), 2)
    given = batches({clipped: LARGE, skipped: float("nan")})
    model = mlp(8, dropout=0.2)
    norms = one_process(model, given, plain, name)
    over = [step for step, norm in enumerate(norms) if not norm <= MOST]
    assert set(over) == {clipped, skipped}, norms
    pipe = validated(mlp(8, dropout=0.2), given, make, schedule=name, num_ranks=2, num_microbatches=4)
    assert_same(pipe, dict(model.named_parameters()))
    # The second of two in a row is not made ahead, so it need not be taken back.
    assert validation_of(pipe).num_amended == 2
    assert validation_of(pipe).num_taken_back == (1 if abs(clipped - skipped) == 1 else 2)


@pytest.mark.features("precision")
def test_masters_tied_weights_and_buffers_come_back_too() -> None:
    given = batches({2: LARGE, 4: float("nan")})
    low = [(batch.bfloat16(), target.bfloat16()) for batch, target in given]
    words = [tied_models.tokens(8, seed=step) for step in range(STEPS)]
    sgd, adamw = OPTIMIZERS["sgd"][0], OPTIMIZERS["adamw"][0]

    def large(output: Tensor, target: Tensor) -> Tensor:
        return tied_models.loss_fn(output, target) * (LARGE if target[0, 0] == 0 else 1.0)

    # Its first row decides on all, so that nobody can tell how much microbatches count.
    loss: dict[str, Any] = {"loss_fn": large, "loss_weight": len}
    counting = {"num_ranks": 2, "num_microbatches": 4, "schedule": "zb-h1"}
    cases: dict[str, tuple[Callable[[], nn.Module], list[Any], Any, dict[str, Any]]] = {
        "masters": (lambda: mlp(4).bfloat16(), low, adamw, {"master_weights": True}),
        "autocast": (lambda: mlp(4), given, adamw, {"precision": "bf16"}),
        "tied": (lambda: tied_models.language_model(dropout=0.1), words, sgd, loss),
        "two copies, tied": (tied_models.language_model, words, adamw, {**loss, "schedule": "dualpipe"}),
        "buffers": (lambda: nn.Sequential(*(Counting() for _ in range(4))), given, sgd, {"schedule": "1f1b"}),
    }
    for what, (make_model, batches_of, make, more) in some(cases.items()):
        plain = synchronised(make_model(), batches_of, make, **{**counting, **more})
        pipe = validated(make_model(), batches_of, make, **{**counting, **more})
        assert_same(pipe, dict(plain.named_parameters()))
        assert validation_of(pipe).num_taken_back > 0, what
        masters = dict(plain.named_master_weights())
        for name, tensor in some(pipe.named_master_weights()):
            assert torch.equal(tensor, masters[name]), (what, name)
        wanted = plain.state_dict()
        for name, tensor in some(pipe.state_dict().items()):
            assert torch.equal(tensor, wanted[name]), (what, name)


class Counting(nn.Module):
    """A layer that counts its forwards in place, and keeps its last mean as a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(()))
        self.count: Tensor
        self.mean: Tensor
        with torch.no_grad():
            self.layer.weight.copy_(torch.eye(WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = self.mean / 2 + x.detach().mean()
        made: Tensor = self.layer(x)
        return made + self.count * 1e-3


def test_learning_rates_of_schedulers_count_as_they_were_at_the_step() -> None:
    given = batches({3: LARGE})

    def scheduled(train: Callable[..., Pipeline]) -> Pipeline:
        def make(pipe: Pipeline, **how: Any) -> list[Optimizer]:
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05, **how)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            rates.append((optimizer, schedule))
            return [optimizer, Following(schedule)]  # type: ignore[list-item]

        return train(mlp(4), given, make, num_ranks=2, num_microbatches=4)

    class Following:
        """Steps a scheduler after the optimizer before it."""

        def __init__(self, schedule: Any) -> None:
            self.step, self.zero_grad = schedule.step, lambda: None

    rates: list[Any] = []
    plain, pipe = scheduled(synchronised), scheduled(validated)
    assert_same(pipe, dict(plain.named_parameters()))
    assert validation_of(pipe).num_taken_back == 1
    assert len({value.param_groups[0]["lr"] for value, _ in some(rates)}) == 1


def test_the_verdict_says_what_was_decided_and_several_updates_without_a_step_wait_for_each_other() -> None:
    given = batches({1: LARGE, 3: float("nan")})
    pipe = Pipeline(mlp(4), loss_fn=functional.mse_loss, num_ranks=2, num_microbatches=4, transport="in-process")
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, **HOW)
    assert pipe.verdict is None
    found: list[Any] = []
    with ahead():
        for batch, target in some(given[:4]):
            pipe.step(batch, target=target)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            pipe.settle()
            assert pipe.verdict is not None
            found.append((pipe.verdict.step, pipe.verdict.clips, pipe.verdict.skips, pipe.verdict.ranks))
        before = copy.deepcopy(pipe.state_dict())
        pipe.step(*given[4][:1], target=given[4][1])
        optimizer.step()
        optimizer.step()  # once more with the same gradients
        pipe.settle()
    assert found == [(0, False, False, ""), (1, True, False, ""), (2, False, False, ""), (3, False, True, "rank 0")]
    gradients = {name: param.grad for name, param in pipe.named_parameters()}
    for name, entry in some(pipe.state_dict().items()):
        gradient = gradients[name]
        assert gradient is not None
        assert torch.equal(entry, before[name].add(gradient, alpha=-0.1).add(gradient, alpha=-0.1)), name


def test_an_evaluation_and_a_state_see_the_update_as_it_stands_in_the_end() -> None:
    given = batches({1: LARGE})
    make = OPTIMIZERS["adamw"][0]
    settings: dict[str, Any] = {"num_ranks": 2, "num_microbatches": 4, "transport": "in-process"}
    settings["loss_fn"] = functional.mse_loss
    kept: list[Optimizer] = []

    def making(pipe: Pipeline) -> list[Optimizer]:
        kept.extend(make(pipe))
        return kept

    plain = synchronised(mlp(4), given[:2], making, **settings)
    pipe = Pipeline(mlp(4), **settings)
    (optimizer,) = make(pipe, **HOW)
    with ahead():
        for batch, target in given[:2]:
            pipe.step(batch, target=target)
            optimizer.step()
            optimizer.zero_grad()
        wanted = plain.eval_step(given[2][0]).output
        assert torch.equal(pipe.eval_step(given[2][0]).output, wanted)
    assert_same(pipe, dict(plain.named_parameters()))
    states = [updater.state_dict()["state"] for updater in (optimizer, *kept)]
    for name, entries in some(states[0].items()):
        for key, entry in some(entries.items()):
            assert torch.equal(entry, states[1][name][key]), (name, key)


class Spoiling(torch.optim.SGD):
    """An optimizer that adds weight decay to the gradients themselves."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad.add_(param, alpha=0.1)
        return super().step(closure)


@pytest.mark.features("precision")
def test_what_cannot_be_made_again_is_refused_with_its_reason() -> None:
    settings: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_ranks": 2, "num_microbatches": 2}
    settings["transport"] = "in-process"
    pipe = Pipeline(mlp(4), **settings)
    with refused(UsageError, "validated is 'later'"):
        pipe.optimizer(torch.optim.SGD, validated="later")
    with refused(UsageError, "max_norm is 1.0, and updates are validated before", fix="clip_grad_norm_"):
        pipe.optimizer(torch.optim.SGD, max_norm=1.0)
    with refused(UsageError, "max_norm is -1"):
        pipe.optimizer(torch.optim.SGD, validated="after", max_norm=-1.0)
    spoiling = pipe.optimizer(Spoiling, names="*.0.*", lr=0.1, **HOW)
    with refused(UsageError, "another optimizer of this pipeline has 10"):
        pipe.optimizer(torch.optim.SGD, lr=0.1, validated="after", max_norm=2.0)
    with refused(UsageError, 'validated is "before", and not so on another'):
        pipe.optimizer(torch.optim.SGD, lr=0.1)
    with refused(UsageError, "clip_grad_norm_ was called, and validated is", fix="max_norm=1 to pipe.optimizer"):
        pipe.clip_grad_norm_(1.0)
    batch, target = data(4)
    pipe.step(batch, target=target)
    with refused(RunError, r'SGD was created directly.*validated="after"'):
        torch.optim.SGD(pipe.parameters(), lr=0.1).step()
    with refused(RunError, "Spoiling changes gradients while it steps"):
        spoiling.step()
    with refused(UsageError, "precision is 'fp16'", expected="loss scale"):
        Pipeline(mlp(4), precision="fp16", **settings).optimizer(torch.optim.SGD, **HOW)


def test_a_loaded_state_is_not_taken_back_and_other_optimizers_may_follow() -> None:
    pipe = Pipeline(mlp(4), loss_fn=functional.mse_loss, num_ranks=2, num_microbatches=2, transport="in-process")
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1, **HOW)
    values, state = copy.deepcopy(pipe.state_dict()), copy.deepcopy(optimizer.state_dict())
    batch, target = data(4)
    with ahead():
        pipe.step(batch, target=target * LARGE)
        optimizer.step()
        optimizer.zero_grad()
        pipe.load_state_dict(values)
        optimizer.load_state_dict(state)
        pipe.settle()
    assert_same(pipe, values)
    assert optimizer.state_dict()["state"] == state["state"] == {}
    assert validation_of(pipe).num_bytes > 0
    del optimizer
    gc.collect()
    assert validation_of(pipe).num_bytes == 0
    plain = pipe.optimizer(torch.optim.SGD, lr=0.1)  # validated before
    pipe.step(batch, target=target * float("nan"))
    with pytest.raises(NonFiniteError):
        plain.step()
    assert_same(pipe, values)


def test_gradients_changed_in_place_are_noticed() -> None:
    pipe = Pipeline(mlp(4), loss_fn=functional.mse_loss, num_ranks=2, num_microbatches=2, transport="in-process")
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, **HOW)
    batch, target = data(4)
    with ahead():
        pipe.step(batch, target=target * LARGE)
        optimizer.step()
    for param in some(pipe.parameters()):
        assert param.grad is not None
        param.grad.zero_()
    with refused(RunError, "changed in place before it was validated", fix="use optimizer.zero_grad"):
        pipe.settle()


# ---- on real ranks ---------------------------------------------------------------------------------------------------


class NaNInWeight(torch.autograd.Function):
    """Passes a value on; where a mark says so, the gradient of the weight beside it is NaN, and no other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> Any:
        value = float("nan") if bool((gradient[0].abs() > 1e6).any()) else 0.0
        return gradient[0].clamp(-0.5, 0.5), torch.full((WIDTH,), value)


class Last(nn.Module):
    """A block whose own bias gets a NaN where the target is huge; what it passes back is finite."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = NaNInWeight.apply(x, self.bias)  # type: ignore[no-untyped-call]
        return made


def chain() -> nn.Sequential:
    return nn.Sequential(*mlp(4), Last())


def trained_on_rank(folder: str, how: dict[str, Any], wrong: dict[int, float], **settings: Any) -> dict[str, Any]:
    """Train on this rank, with a save, an evaluation and a look at one rank's state where updates are taken back."""
    with Pipeline(chain(), loss_fn=functional.mse_loss, num_microbatches=4, timeout=60, **settings) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01, **how)
        norms, evaluated = [], []
        number, count = pipe.axes.rows
        for step, (batch, target) in enumerate(batches(wrong)):
            batch, target = (tensor.chunk(count)[number] for tensor in (batch, target))
            pipe.step(batch, target=target)
            if not how:
                try:
                    norms.append(pipe.clip_grad_norm_(NO_RANK_ALONE).item())
                    optimizer.step()
                except NonFiniteError:
                    pass
            else:
                optimizer.step()
                if pipe.rank == 0 and step == 2:
                    optimizer.state_dict()  # one rank asks before the others
            optimizer.zero_grad()
            if step == 4:
                evaluated.append(pipe.eval_step(batch).output)
                pipe.save(folder, wait=True)
        pipe.settle()
        told = pipe.verdict
        record = pipe.timeline()
        found = {name: param.detach().clone() for name, param in pipe.named_parameters()}
        pipe.load(folder)
        validation = validation_of(pipe)
        return {
            "found": found,
            "loaded": {name: param.detach().clone() for name, param in pipe.named_parameters()},
            "state": {name: dict(entry) for name, entry in optimizer.state_dict()["state"].items()},
            "evaluated": evaluated,
            "counts": (validation.num_amended, validation.num_taken_back),
            "norm": norms[-1] if told is None or told.norm is None else told.norm.item(),
            "actions": [len(track.actions) for track in record.tracks],
        }


WRONG = {2: 15.5, 4: 1e12}  # a norm that no rank alone has; then a NaN that only the last stage has
AFTER: dict[str, Any] = {"validated": "after", "max_norm": NO_RANK_ALONE}


def assert_as_if_waited(ranks: list[list[dict[str, Any]]]) -> None:
    """Compare results of pairs, of updates that waited and of those that did not."""
    for results in some(ranks):
        for plain, ours in some(zip(results[::2], results[1::2], strict=True)):
            for what in ("found", "loaded"):
                for name, value in some(ours[what].items()):
                    assert torch.equal(value, plain[what][name]), (what, name)
            for name, entries in some(ours["state"].items()):
                for key, entry in some(entries.items()):
                    assert torch.equal(entry, plain["state"][name][key]), (name, key)
            for value, other in some(zip(ours["evaluated"], plain["evaluated"], strict=True)):
                assert (value is None and other is None) or torch.equal(value, other)
            assert ours["counts"][0] == 2
            assert ours["norm"] == plain["norm"]
            assert ours["actions"] == plain["actions"]


def rank_0_goes_on_while_rank_1_has_not_told(folder: Path) -> bool:
    """Let rank 1 tell its norms only once rank 0 is in its next step; updates that wait would wait here for good."""
    with Pipeline(mlp(4), loss_fn=functional.mse_loss, num_microbatches=4, schedule="zb-h2", timeout=60) as pipe:
        optimizer, mark = pipe.optimizer(torch.optim.SGD, lr=0.1, **HOW), folder / "goes on"
        batch, target = data(8)
        pipe.step(batch, target=target)
        if pipe.rank:
            wait_for(mark)
        optimizer.step()
        optimizer.zero_grad()
        if pipe.rank == 0:
            first = pipe._engine.executors[0].stages[0].blocks[0].module
            first.register_forward_hook(lambda *_: mark.touch())
        pipe.step(batch, target=target)
        return mark.exists()


def wait_for(mark: Path) -> None:
    end = time.monotonic() + 60
    while not mark.exists():
        assert time.monotonic() < end, "the other rank waits"
        time.sleep(0.01)


@pytest.mark.features("record", "saving")
@pytest.mark.slow
def test_real_ranks_take_updates_back_as_if_they_had_waited(tmp_path: Path) -> None:
    def on_rank() -> tuple[list[dict[str, Any]], bool]:
        cases: list[dict[str, Any]] = [{}, AFTER]
        results = [
            trained_on_rank(f"{tmp_path}/{schedule}-{number}", how, WRONG, schedule=schedule)
            for schedule in ("zb-h1", "zb-v")
            for number, how in enumerate(cases)
        ]
        return results, rank_0_goes_on_while_rank_1_has_not_told(tmp_path)

    ranks = dl.launch(on_rank, num_ranks=2, timeout=240)
    assert_as_if_waited([results for results, _ in ranks])
    # The rank with the NaN waited for the others there, so it had nothing to take back.
    for at in (1, 3):
        assert sorted(results[at]["counts"][1] for results, _ in ranks) == [1, 2]
    assert all(goes_on for _, goes_on in ranks)


@long
@pytest.mark.slow
def test_lines_of_a_mesh_take_the_same_updates_back(tmp_path: Path) -> None:
    def on_rank() -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = [{}, AFTER]
        mesh = {"pp": 2, "dp": 2}
        found = [
            trained_on_rank(f"{tmp_path}/{number}", how, WRONG, schedule="zb-h1", mesh=mesh)
            for number, how in enumerate(cases)
        ]
        pipe = Pipeline(mlp(4), loss_fn=functional.mse_loss, num_microbatches=4, mesh=mesh, zero=1)
        with pipe, refused(UsageError, "zero divides state"):
            pipe.optimizer(torch.optim.SGD, **AFTER)
        return found

    assert_as_if_waited(dl.launch(on_rank, num_ranks=4, timeout=240))


@pytest.mark.slow
def test_a_rank_that_dies_before_it_tells_its_norms_is_named() -> None:
    def on_rank() -> None:
        with Pipeline(mlp(4), loss_fn=functional.mse_loss, num_microbatches=4, timeout=60) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, **HOW)
            batch, target = data(8)
            pipe.step(batch, target=target)
            if pipe.rank == 1:
                os._exit(7)
            optimizer.step()  # waits for nobody
            optimizer.zero_grad()
            pipe.step(batch, target=target)

    with pytest.raises(RankFailed, match="rank 1"):
        dl.launch(on_rank, num_ranks=2, timeout=120)
