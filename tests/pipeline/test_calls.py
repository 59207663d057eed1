"""A function that calls the model itself, through a pipeline: its losses and gradients are those of plain PyTorch."""

from __future__ import annotations

import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import BatchError, DrumlineError, ModelError
from drumline.pipeline.calls.ahead import Ahead
from drumline.pipeline.calls.draws import TwiceDrawn
from drumline.pipeline.calls.function_steps import FunctionSteps
from drumline.pipeline.calls.functions import Functions, StandIn
from refused import refused
from some import some

pytestmark = pytest.mark.torch
M = 4


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(number, 3, generator=generator)} for number in range(1, M + 1)]


def noisy_loss(row: dict[str, Tensor], model: Any) -> Tensor:
    """Draw before the call, and make a loss of what comes back."""
    scale = torch.rand(()) + random.random() + np.random.random()
    loss: Tensor = (model(row["x"] * scale) - 1).square().mean()
    return loss


def test_a_function_that_calls_the_model_trains_as_in_plain_pytorch() -> None:
    plain, model = chain(), chain()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    losses = [noisy_loss(row, plain) for row in rows()]
    torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]

    functions, draws = Functions(model, "noisy_loss"), TwiceDrawn(0, torch.device("cpu"))
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    calls = [functions.call_of(partial(noisy_loss, rows()[number])) for number in draws.noted(M)]

    def loss_fn(output: Tensor, number: int) -> Any:
        with draws.again(number, step=0):
            return functions.answered(lambda named: output, partial(noisy_loss, rows()[number]))

    args, named = functions.together(calls)
    settings: dict[str, Any] = {"num_ranks": 2, "transport": "in-process", "check_model": False}
    pipe = dl.Pipeline(model, loss_fn=loss_fn, loss_weight=lambda number: 1.0, num_microbatches=M, **settings)
    loss = pipe.step(*args, target=dl.Microbatches(range(M)), **named).loss
    torch.testing.assert_close(loss, torch.stack(losses).mean())
    for own, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(own.grad, wanted.grad)
    drawn = [torch.rand(()) for _ in range(2)]
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    for row in rows():
        noisy_loss(row, plain)
    assert drawn == [torch.rand(()) for _ in range(2)]  # all go on as if the function had run once


def steps_of(model: nn.Module, **settings: Any) -> FunctionSteps:
    given: dict[str, Any] = {"num_ranks": 2, "transport": "in-process", "check_model": False, "num_microbatches": M}
    return FunctionSteps(model, **{**given, **settings})


@pytest.mark.parametrize("count", [M, M - 1])
def test_steps_of_functions_train_on_the_sum_of_their_losses_also_with_fewer_batches(count: int) -> None:
    plain, model = chain(), chain()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    wanted = sum((noisy_loss(row, plain) for row in rows()[:count]), torch.zeros(()))
    wanted.backward()  # type: ignore[no-untyped-call]
    steps = steps_of(model)
    model.eval()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(5)
    loss = steps.train(lambda model, row: noisy_loss(row, model), rows()[:count])
    assert model.training
    torch.testing.assert_close(loss, wanted.detach())
    for own, other in some(zip(model.parameters(), plain.parameters(), strict=True)):
        torch.testing.assert_close(own.grad, other.grad)


def test_evaluations_return_what_the_function_makes_of_each_batch_and_draw_nothing() -> None:
    model, drawn = chain(), []

    def function(model: Any, row: dict[str, Tensor]) -> Any:
        output = model(row["x"])
        drawn.append(float(torch.rand(())))
        return output.sum(), row

    steps, states = steps_of(model), torch.get_rng_state()
    outcomes = steps.evaluate(function, rows()[:3], step=7)
    assert not model.training
    assert torch.equal(torch.get_rng_state(), states)
    for outcome, row in some(zip(outcomes, rows()[:3], strict=True)):
        assert outcome is not None
        torch.testing.assert_close(outcome[0], model(row["x"]).sum())
        torch.testing.assert_close(outcome[1], row)
    assert len(set(drawn)) == 3
    first = list(drawn)
    steps.evaluate(function, rows()[:3], step=8)
    assert not set(first) & set(drawn[3:])


def test_steps_of_another_model_beside_train_nothing_and_have_the_same_settings() -> None:
    steps = steps_of(chain(), schedule="zb-h1")
    other = steps.beside(chain())
    assert other.pipe.program.name == "zb-h1"
    assert other.size == M
    assert other.evaluate(lambda model, row: model(row["x"]).shape[0], rows()) == [1, 2, 3, 4]


def scaling(model: Any, row: dict[str, Tensor]) -> Any:
    loss = model(row["x"])
    loss *= 2
    return loss


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_a_loss_of_the_model_may_be_scaled_in_place() -> None:
    plain = chain()
    loss = steps_of(nn.Sequential(*chain(), Sum())).train(scaling, rows())
    torch.testing.assert_close(loss, 2 * torch.stack([plain(row["x"]).sum() for row in rows()]).sum().detach())


class Named(nn.Module):
    """Returns its loss by name, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = chain()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": self.layers(x).sum(), "size": x.square().sum()}


def scaling_by_name(model: Any, row: dict[str, Tensor]) -> Any:
    loss = model(row["x"])["loss"]
    loss *= 2
    return loss


def test_a_loss_by_name_may_be_scaled_in_place_while_the_model_is_checked() -> None:
    plain = chain()
    steps = steps_of(Named(), check_model=True, example=torch.ones(M, 3))
    loss = steps.train(scaling_by_name, rows())
    torch.testing.assert_close(loss, 2 * torch.stack([plain(row["x"]).sum() for row in rows()]).sum().detach())


@pytest.mark.parametrize("schedule", ["pipedream", "chimera"])
def test_schedules_in_which_functions_cannot_run_are_refused(schedule: str) -> None:
    with refused(DrumlineError, schedule):
        steps_of(chain(), schedule=schedule)


@pytest.mark.parametrize("count", [0, M + 1])
def test_other_numbers_of_batches_are_refused(count: int) -> None:
    with refused(BatchError, f"the step has {count} batch", expected="1 to 4"):
        steps_of(chain()).evaluate(lambda model, row: model(row["x"]), (rows() * 2)[:count])


@pytest.mark.parametrize("again", ["same", "other"])
def test_a_second_call_may_have_the_same_arguments_only(again: str) -> None:
    def twice(model: Any) -> Any:
        x = torch.ones(1)
        return model(x=x, fused=True) + model(x=x if again == "same" else torch.ones(1), fused=False)

    functions = Functions(chain(), "loss_of")
    with refused(ModelError, "a second time") if again == "other" else nullcontext():
        assert functions.answered(lambda named: int(named["fused"]), twice, differing=["fused"]) == 1
    with refused(ModelError, "loss_of called the model a second time"):
        functions.answered(lambda named: 1, twice)


def test_a_stand_in_without_an_answer_refuses_calls() -> None:
    with refused(ModelError, "a callback calls the model"):
        StandIn(chain(), None, "a callback")(torch.ones(3))


def test_a_loader_without_an_end_of_its_own_is_read_in_groups_to_its_end() -> None:
    seen: list[list[int]] = []

    def run(batches: list[list[int]]) -> list[int]:
        seen.append([batch[0] for batch in batches])
        return [batch[0] for batch in batches]

    loader = [[number] for number in range(5)]
    ahead = Ahead(loader, 2)
    assert [ahead.outcome_of(batch, run) for batch in ahead] == list(range(5))
    assert seen == [[0, 1], [2, 3], [4]]
    assert ahead.outcome_of([9], run) == 9
    iterator = iter(ahead)
    next(iterator)
    assert ahead.outcome_of(next(iterator), run) == 1  # the first of the group was not asked for
    assert seen[-2:] == [[9], [1]]


def test_calls_with_other_arguments_are_refused() -> None:
    functions = Functions(chain(), "loss_of")
    calls: list[Any] = [((), {"x": torch.ones(1)}), ((), {"y": torch.ones(1)})]
    with refused(ModelError, "loss_of calls the model with other arguments", expected="the same arguments"):
        functions.together(calls)


@pytest.mark.parametrize(
    ("function", "named"),
    [
        (lambda model: None, "loss_of did not call the model"),
        (lambda model: model.get_submodule("0")(torch.ones(3)), "loss_of calls a Linear of the model by itself"),
        (lambda model: model.state_dict(), r"loss_of uses state_dict\(\) of the model"),
    ],
)
def test_what_other_ranks_could_not_do_is_refused(function: Any, named: str) -> None:
    with refused(ModelError, named):
        Functions(chain(), "loss_of").call_of(function)


def test_attributes_that_are_set_before_the_call_are_refused() -> None:
    class Holder:
        count = 0

    holder = Holder()
    with refused(ModelError, r"loss_of sets self\.count"), Functions(chain(), "loss_of").unchanged(holder, []):
        holder.count = 1


def test_a_stand_in_is_an_instance_of_the_models_class() -> None:
    model = chain()
    stand_in: Any = StandIn(model, lambda x: x + 1)
    assert isinstance(stand_in, nn.Sequential)
    assert stand_in(2) == 3
    assert stand_in.training
