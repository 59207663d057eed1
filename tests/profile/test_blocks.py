"""Profiled blocks: their seconds and bytes, and a model that is left as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from chains import rank_bytes
from counted_time import counted_time
from drumline.core.errors import BatchError, ModelError
from drumline.core.simulate.simulate import simulate
from drumline.pipeline.pipeline import Pipeline
from drumline.plan.cut.peaks import held_by
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.profile.blocks import _told_apart, profile
from drumline.schedules import generate
from matrices import matrix
from refused import refused
from some import some
from torch_models import WIDTH, data, mlp

pytestmark = pytest.mark.torch

ROWS = 4
FLOAT = 4


def profiled(model: nn.Sequential, **settings: Any) -> Profile:
    batch, target = data(ROWS)
    return profile(model, batch, target=target, loss_fn=functional.mse_loss, num_runs=2, **settings)


def made_up(*seconds: float) -> Profile:
    layers = [
        ProfiledBlock(
            str(at), OpTimes(item, 2 * item, item, item), 10, 8, 3, weight_bytes=40, gradient_bytes=20, output_bytes=5
        )
        for at, item in enumerate(seconds)
    ]
    return Profile(tuple(layers), OpTimes(0.5, 0.25, 0.125, 0.125), "cpu", 1)


def test_every_block_has_times_and_bytes() -> None:
    with counted_time():
        found = profiled(mlp(3))
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    for item in found.layers:
        assert min(item.times.forward, item.times.backward, item.times.backward_input, item.times.backward_weight) >= 0
        assert item.times.total(split=False) > 0
        assert item.weight_bytes == item.gradient_bytes == (WIDTH * WIDTH + 3 * WIDTH) * FLOAT
    assert [layer.output_bytes for layer in found.layers] == [ROWS * WIDTH * FLOAT] * 2 + [FLOAT]
    assert min(found.overhead.forward, found.overhead.backward_input) >= 0


def test_frozen_weights_have_no_gradients_and_buffers_count_as_weights() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    model[0].requires_grad_(False)
    first, second = profiled(model).layers
    assert (first.weight_bytes, first.gradient_bytes) == ((WIDTH + 1) * WIDTH * FLOAT, 0)
    assert (second.weight_bytes, second.gradient_bytes) == (4 * WIDTH * FLOAT + 8, 2 * WIDTH * FLOAT)


def test_a_model_is_left_as_it_was() -> None:
    class Counting(nn.Module):
        """Replaces its buffer in place of changing it."""

        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, value: Tensor) -> Tensor:
            self.count = self.count + 1
            return value * 2

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), Counting(), nn.Linear(6, 6))
    for at, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, 3.0) if at % 2 else None
    before, gradients = copy.deepcopy(model.state_dict()), [param.grad for param in model.parameters()]
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    batch, target = torch.ones(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    profile(model, batch, target=target, loss_fn=functional.mse_loss, num_runs=2)
    assert torch.equal(torch.rand(3), expected)
    assert all(some(torch.equal(entry, before[name]) for name, entry in model.state_dict().items()))
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        assert param.grad is gradient
        assert gradient is None or bool((gradient == 3).all())
    assert all(some("forward" not in vars(module) for module in model.modules()))


def test_a_failing_block_leaves_gradients_and_random_numbers_too() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(3, 3))
    model[0].weight.grad = gradient = torch.ones(WIDTH, WIDTH)
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        profile(model, torch.ones(ROWS, WIDTH))
    assert model[0].weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.features("record")
@matrix("blocks, counts, schedule", ["gelu", "relu", "norm"], [(1, 5), (3, 3), (2, 4)], ["1f1b", "zb-h1"])
def test_bytes_of_a_cut_are_what_its_stages_really_hold(blocks: str, counts: tuple[int, int], schedule: str) -> None:
    kinds: dict[str, list[nn.Module]] = {
        "gelu": [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)],
        "relu": [nn.ReLU() if at % 2 else nn.Linear(WIDTH, WIDTH) for at in range(6)],
        "norm": [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(6)],
    }
    model = nn.Sequential(*kinds[blocks])
    found = profiled(model)
    pipe = Pipeline(
        model,
        loss_fn=functional.mse_loss,
        schedule=schedule,
        num_microbatches=4,
        num_ranks=2,
        balance=counts,
        weigh=True,
    )
    batch, target = data(4 * ROWS)
    pipe.step(batch, target=target)
    measured, predicted = pipe.timeline().measured_costs(), found.costs(counts)
    received = ROWS * WIDTH * FLOAT  # counts here, and is told apart there
    first, second = predicted.per_stage("activation_bytes", 2)
    assert (first, second - received) == measured.per_stage("activation_bytes", 2)
    if schedule == "zb-h1":
        needed = 0 if isinstance(model[counts[0]], nn.ReLU) else received  # by W, which a ReLU does not have
        first, second = predicted.per_stage("held_until_weight_bytes", 2)
        assert (first, second - needed) == measured.per_stage("held_until_weight_bytes", 2)


def test_costs_of_a_cut_add_its_blocks_up_and_a_stages_own_once() -> None:
    costs = made_up(1.0, 2.0, 4.0).costs([2, 1], optimizer_states=3)
    assert costs.per_stage("forward", 2) == (3.5, 4.5)
    assert costs.per_stage("backward", 2) == (6.25, 8.25)
    assert costs.per_stage("backward_input", 2) == costs.per_stage("backward_weight", 2) == (3.125, 4.125)
    assert costs.per_stage("activation_bytes", 2) == (23, 13)
    assert costs.per_stage("held_until_weight_bytes", 2) == (16, 8)
    assert costs.per_stage("message_bytes", 2) == (5, 0)
    assert costs.per_stage("optimizer_bytes", 2) == (120, 60)


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b", "dualpipe"])
def test_the_planner_and_the_simulator_see_the_same_peaks(name: str) -> None:
    program = generate(name, num_ranks=2, num_microbatches=4)
    found = made_up(*range(6))
    counts = [2, 4] if program.num_stages == 2 else [1, 2, 1, 2]
    planned = rank_bytes(found.blocks(split=True), counts, held_by(program))
    assert planned == simulate(program, found.costs(counts)).peak_bytes


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b", "dualpipe"])
def test_a_tied_weight_counts_once_on_every_rank(name: str) -> None:
    program = generate(name, num_ranks=2, num_microbatches=4)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))
    model[5].weight = model[3].weight = model[0].weight
    found = profiled(model)
    assert Profile.from_json(found.to_json()) == found
    assert [len(layer.tied) for layer in found.layers] == [1, 0, 0, 1, 0, 1]
    size = WIDTH * WIDTH * FLOAT
    counts = [2, 4] if program.num_stages == 2 else [1, 2, 1, 2]
    costs = found.costs(counts, optimizer_states=2, placement=program.placement)
    planned = rank_bytes(found.blocks(split=True, optimizer_states=2), counts, held_by(program))
    assert planned == simulate(program, costs).peak_bytes
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=program, num_ranks=2, balance=counts)
    for rank, executor in enumerate(pipe._engine.executors):
        held = {param for stage in executor.stages.values() for param in stage.parameters}
        static = sum(costs.per_stage("weight_bytes", len(counts))[stage] for stage in executor.stages)
        assert static == len(held) * size
        trained = sum(costs.per_stage("gradient_bytes", len(counts))[stage] for stage in executor.stages)
        assert simulate(program, costs).memory[rank].static_bytes == static + 3 * trained


def test_what_one_stage_of_all_blocks_saves_is_what_calls_cost() -> None:
    apart = [[[3.0, 5.0, 4.0], [6.0, 6.0, 6.0]], [[3.0, 5.0, 4.0], [6.0, 6.0, 6.0]]]
    at_once = [[[10.0], [20.0]], [[10.0], [20.0]]]  # forwards 2 less than apart; backwards, by noise, more
    halves = [[*row, *row] for row in apart], [[*row, *row] for row in at_once]
    layers, overhead = _told_apart(*halves)
    assert overhead == OpTimes(1.0, 0.0, 1.0, 0.0)
    assert layers == [OpTimes(2.0, 6.0, 2.0, 6.0), OpTimes(4.0, 6.0, 4.0, 6.0), OpTimes(3.0, 6.0, 3.0, 6.0)]


def test_a_profile_is_json() -> None:
    found = made_up(1e-3, 2e-3)
    assert Profile.from_json(found.to_json()) == found


def test_what_cannot_be_measured_is_refused() -> None:
    batch, target = data(ROWS)
    with refused(BatchError, "there is a loss_fn but no target", fix="pass target="):
        profile(mlp(2), batch, loss_fn=functional.mse_loss)
    with refused(ModelError, "num_runs is 0"):
        profile(mlp(2), batch, target=target, num_runs=0)
    with refused(ModelError, r"counts are \[1, 2\]", expected="1 or more each, 2 in total"):
        made_up(1.0, 2.0).costs([1, 2])
