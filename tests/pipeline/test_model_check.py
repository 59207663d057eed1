"""The check of the first step: it finds what was followed wrongly, and leaves nothing behind."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.engine.unsplit.comparing import off
from drumline.engine.unsplit.plain import Plain
from drumline.engine.unsplit.unsplit_step import UnsplitMicrobatch
from drumline.features.check.by_itself.wanted import wanted_of
from drumline.features.check.gradients.sketch import few, sketch
from drumline.model.precision import Precision
from drumline.model.randomness import Randomness
from drumline.model.watch.keeping import undisturbed
from drumline.pipeline.pipeline import Pipeline
from follow_faults import FAULTS, Skips, data, lost_path
from refused import refused
from tally import Tally
from torch_models import on_meta

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]

SCHEDULES = ["1f1b", "zb-v", "gpipe"]


def pipeline(model: nn.Module | None = None, **settings: Any) -> Pipeline:
    torch.manual_seed(0)
    given: dict[str, Any] = {"num_microbatches": 4, "num_ranks": 2, "balance": "even", "loss_fn": functional.mse_loss}
    return Pipeline(model or Skips(), example=data()[0], **(given | settings))


def step(pipe: Pipeline) -> None:
    batch, target = data()
    pipe.step(batch, target=target)


@pytest.mark.features("record")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_is_right_passes_and_says_what_it_took(schedule: str) -> None:
    pipe = pipeline(schedule=schedule)
    assert pipe.checked is None
    step(pipe)
    found = pipe.checked
    assert found is not None
    assert (found.num_parameters, found.wrong, found.unchecked) == (10, (), "")
    assert found.seconds > 0
    assert [value.kind for value in pipe.timeline().between if value.kind == "check"] == ["check"] * 2  # on each rank


@pytest.mark.parametrize("settings", [{"merge_weight_gradients": True}, {"checkpoint": "full"}, {"precision": "bf16"}])
def test_it_passes_with_other_settings(settings: dict[str, Any]) -> None:
    pipe = pipeline(schedule="zb-h1", **settings)
    step(pipe)
    assert pipe.checked is not None
    assert pipe.checked.num_parameters == 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_refused_before_an_optimizer_steps(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    pipe = pipeline()
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    before = {name: param.detach().clone() for name, param in pipe.named_parameters()}
    with refused(ModelError, r"returns something else than by itself: .*layers\.\d.*in block 'layers\.\d'"):
        step(pipe)
    with refused(ModelError, "returns something else than by itself"):
        optimizer.step()
    with refused(ModelError, "returns something else than by itself"):
        step(pipe)
    assert all(torch.equal(param, before[name]) for name, param in pipe.named_parameters())
    assert pipe.checked is not None
    assert pipe.checked.wrong


def test_a_microbatch_that_counts_is_what_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    lost_path(monkeypatch)
    pipe = pipeline(loss_weight=lambda target: float(target.any()))
    batch, target = data()
    target[:2] = 0
    with refused(ModelError, "returns something else than by itself: the gradient of"):
        pipe.step(batch, target=target)


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_loss_that_is_weighed_only_once_it_was_seen_passes(is_inside: bool) -> None:
    def loss_fn(output: Tensor, target: Any) -> Tensor:
        target = target["inside"] if is_inside else target
        mask = (target > 0).float()
        loss: Tensor = ((output - target).square() * mask).sum() / mask.sum()
        return loss

    pipe = pipeline(loss_fn=loss_fn)
    batch, target = data()
    pipe.step(batch, target={"inside": target} if is_inside else target)
    assert pipe.checked is not None
    assert (pipe.checked.num_parameters, pipe.checked.wrong) == (10, ())


class Wide(nn.Module):
    """A model with a weight that is large enough to be compared by a sketch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 80), nn.Linear(80, 80), nn.Linear(80, 6)])

    def forward(self, x: Tensor) -> Any:
        first = self.layers[0](x)
        return self.layers[2](self.layers[1](first) + first)


@pytest.mark.parametrize(("apart", "is_wrong"), [(0.0, False), (5e-5, False), (2e-4, True)])
def test_what_sketches_leave_in_doubt_is_compared_in_full(apart: float, is_wrong: bool) -> None:
    calls = Tally()

    def once(gradient: Tensor) -> Tensor:
        return gradient * (1 + apart) if calls() == 2 else gradient  # in the step's first microbatch

    model = Wide()
    weight = model.layers[1].weight
    assert isinstance(weight, nn.Parameter)
    weight.register_hook(once)  # type: ignore[no-untyped-call]
    pipe = pipeline(model)
    if is_wrong:
        with refused(ModelError, r"the gradient of layers\.1\.weight, in block 'layers\.1', is 0\.0002 of"):
            step(pipe)
    else:
        step(pipe)
    assert calls.count == 2 + 4 + 2 * (apart > 0)  # the model by itself, the step, and the model once more


def test_a_wrong_gradient_of_a_few_elements_is_named() -> None:
    calls = Tally()

    def once(gradient: Tensor) -> Tensor:
        wrong = gradient.clone()
        wrong[7, 3] += 2e-3 * gradient.norm()
        return wrong if calls() == 2 else gradient

    model = Wide()
    weight = model.layers[1].weight
    assert isinstance(weight, nn.Parameter)
    weight.register_hook(once)  # type: ignore[no-untyped-call]
    with refused(ModelError, r"the gradient of layers\.1\.weight, in block 'layers\.1', is 0\.002 of"):
        step(pipeline(model))


def test_without_it_a_fault_goes_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[0](monkeypatch)
    pipe = pipeline(check_model=False)
    step(pipe)
    assert pipe.checked is None


def test_it_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = Skips()
    steps: list[str] = []
    weight = model.layers[0].weight
    assert isinstance(weight, nn.Parameter)
    weight.register_post_accumulate_grad_hook(lambda _: steps.append("accumulated"))  # type: ignore[no-untyped-call]
    pipe = pipeline(model)
    earlier = torch.ones_like(weight)
    weight.grad = earlier.clone()
    torch.manual_seed(3)
    state, chance = torch.get_rng_state(), random.getstate()
    model.norm.calls = 0
    step(pipe)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == chance
    assert int(model.norm.num_batches_tracked or 0) == 4
    assert pipe.checked is not None
    assert pipe.checked.num_parameters == 9  # what such a hook does cannot be compared
    assert len(steps) == 4  # once for each microbatch of the step, and never in the check
    assert model.norm.calls == 4
    reference = pipeline(check_model=False)
    step(reference)
    for (name, param), (_, other) in zip(pipe.named_parameters(), reference.named_parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        if param is weight:
            torch.testing.assert_close(param.grad, other.grad + earlier)
        else:
            assert torch.equal(param.grad, other.grad), name


def test_it_costs_two_forwards_of_each_block() -> None:
    counts = []
    for check in (True, False):
        calls = Tally()
        model = Skips()
        model.layers[2].register_forward_pre_hook(lambda *_, calls=calls: calls() and None)
        pipe = pipeline(model, check_model=check)
        before = calls.count
        step(pipe)
        counts.append(calls.count - before)
        step(pipe)
        assert calls.count == before + counts[-1] + 4
    assert counts[0] == counts[1] + 2


class Mixed(nn.Module):
    def __init__(self, forward: Callable[[Mixed, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.between = forward

    def forward(self, x: Tensor) -> Any:
        return self.layers[2](self.between(self, self.layers[1](self.layers[0](x))))


class Chancy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * random.random()


def test_what_nobody_seeds_is_not_checked_and_one_line_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    model = Mixed(lambda _, x: x)
    model.layers[1] = Chancy(6, 6)
    pipe = pipeline(model)
    step(pipe)
    assert pipe.checked is not None
    assert "random numbers of Python's or numpy's" in pipe.checked.unchecked
    assert capfd.readouterr().err.count("the first step was not checked against the model by itself: rank 0") == 1


def test_a_model_without_memory_is_checked_where_all_ranks_are_in_one_process() -> None:
    pipe = pipeline(on_meta(lambda: Mixed(lambda _, x: x.tanh())))
    step(pipe)
    assert pipe.checked is not None  # all ranks are in this process, so that all of it came to memory
    assert pipe.checked.num_parameters == 6


_moods = iter(range(1, 1000))


def test_a_model_with_moods_is_refused() -> None:
    moods = Tally()
    pipe = pipeline(Mixed(lambda _, x: x * (moods() + 1)))
    with refused(ModelError, "returns something else each time it is called"):
        step(pipe)
    with refused(ModelError, r"takes from the variable '_moods', a range_iterator, between its blocks"):
        step(pipeline(Mixed(lambda _, x: x * next(_moods))))


@pytest.mark.features("record")
def test_the_record_of_the_first_step_says_what_it_cost_and_found(tmp_path: Path) -> None:
    with pipeline(record=tmp_path / "run") as pipe:
        step(pipe)
        step(pipe)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["check_metrics/parameters"] == 10
    assert lines[0]["check_metrics/wrong"] == 0
    assert lines[0]["check_metrics/seconds"] > 0
    assert lines[0]["pp/rank0/check_seconds"] > 0
    assert "check_metrics/seconds" not in lines[1]


# ---- its parts -------------------------------------------------------------------------------------------------------


def test_the_model_by_itself_draws_what_its_blocks_draw_wherever_it_is_cut() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Dropout(0.5) for _ in range(2)])

        def forward(self, x: Tensor) -> Any:
            return [self.blocks[0](x), self.blocks[1](x), self.blocks[0](x)]

    randomness, x = Randomness(0, torch.device("cpu")), torch.ones(50)
    with Plain(Drops(), ["blocks.0", "blocks.1", "blocks.0#2"]).seeding(3, randomness) as run:
        made = run(type("", (), {"args": (x,), "kwargs": {}}))
    for value, name in zip(made, ["blocks.0", "blocks.1", "blocks.0#2"], strict=True):
        randomness.apply(3, name)
        assert torch.equal(value, functional.dropout(x, 0.5))


def test_a_block_that_is_recomputed_in_the_backward_draws_the_same_again() -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)) for _ in range(3)])

        def forward(self, x: Tensor) -> Any:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    pipe = pipeline(Again(), num_ranks=1)
    step(pipe)
    assert pipe.checked is not None
    assert pipe.checked.num_parameters == 6


def test_what_modules_hold_is_given_back() -> None:
    module: Any = nn.BatchNorm1d(6)
    module.seen = [1]
    with undisturbed([module]):
        module(torch.randn(4, 6))
        module.seen.append(2)
        module.late = 3
        module.eval()
    assert (int(module.num_batches_tracked or 0), module.seen, module.training) == (0, [1], True)
    assert not hasattr(module, "late")


def test_sketches_see_what_sums_would_hide() -> None:
    tensor = torch.randn(40, 30)
    tensor -= tensor.mean(0)
    assert max(abs(a) for a in few(sketch(tensor))) > 1
    assert off(tensor, tensor + 1e-9) < 1e-7
    assert off(tensor * float("nan"), tensor) == float("inf")


class _IntoABuffer(torch.autograd.Function):
    """Adds a parameter, whose gradient it returns in memory that it uses again."""

    memory = torch.zeros(3)

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        _IntoABuffer.memory.copy_(gradient.sum(0))
        return gradient, _IntoABuffer.memory.detach()


def test_a_gradient_in_memory_that_is_used_again_is_copied() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Any:
            return _IntoABuffer.apply(x, self.bias)  # type: ignore[no-untyped-call]

    model = Biased()
    [seen] = wanted_of(
        Plain([model], ["0"]),
        [UnsplitMicrobatch(0, torch.ones(2, 3), None, 1.0)],
        lambda output, _: output.sum(),
        trained=[model.bias],
        in_full=True,
        device=torch.device("cpu"),
        randomness=Randomness(0, torch.device("cpu")),
        precision=Precision(),
    )
    _IntoABuffer.memory.zero_()
    assert seen.gradients[model.bias].tolist() == [2.0, 2.0, 2.0]


def test_the_check_takes_no_longer_than_the_step_around_it() -> None:
    pipe = pipeline()
    begun = time.perf_counter()
    step(pipe)
    spent = time.perf_counter() - begun
    assert pipe.checked is not None
    assert 0 < pipe.checked.seconds < spent
