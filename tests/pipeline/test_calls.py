"""A function that calls the model itself, through a pipeline: its losses and gradients are those of plain PyTorch."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import ModelError
from drumline.pipeline.calls.draws import TwiceDrawn
from drumline.pipeline.calls.functions import Functions, StandIn
from refused import refused

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
