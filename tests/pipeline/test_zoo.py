"""Every hostile module of the zoo: the gradients of the plain model, or a refusal; never silently wrong."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import zoo
from drumline.core.errors import ModelError
from drumline.pipeline.pipeline import Pipeline
from zoo import ONLY_BY_CHECK, WIDTH, ZOO, Entry

pytestmark = pytest.mark.torch
SCHEDULES = ("1f1b", "zb-h1", "zb-v")
STEPS = 3


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Put back what animals change outside of themselves."""
    yield
    zoo.FACTOR, zoo.ClassLevel.factor = 1.0, 1.0
    zoo.SETTINGS["scale"] = 1.0


def made(entry: Entry) -> nn.Module:
    torch.manual_seed(0)
    random.seed(0)
    return entry.make()


def data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=generator), torch.randn(8, WIDTH, generator=generator)


def plain(entry: Entry, settings: dict[str, Any]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Return loss and gradients of every step, microbatch by microbatch through the model itself."""
    model, found = made(entry), []
    low = settings.get("precision") == "bf16"
    for step in range(STEPS):
        if entry.change is not None:
            entry.change(model, step)
        model.zero_grad()
        x, y = data(step)
        total = torch.zeros(())
        for one, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
                loss = functional.mse_loss(model(one).float(), wanted) / 4
            torch.autograd.backward(loss)
            total += loss.detach()
        named = model.named_parameters()
        found.append((total, {name: one.grad.clone() for name, one in named if one.grad is not None}))
    return found


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


def piped(entry: Entry, schedule: str, settings: dict[str, Any]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    model, found = made(entry), []
    given = {name: one for name, one in settings.items() if name != "tolerance"}
    example = data(0)[0] if entry.example else None
    pipe = Pipeline(
        model, loss_fn=loss_of, schedule=schedule, num_microbatches=4, num_ranks=2, example=example, balance="even",
        **given,
    )  # fmt: skip
    for step in range(STEPS):
        if entry.change is not None:
            entry.change(model, step)
        pipe.zero_grad()
        x, y = data(step)
        result = pipe.step(x, target=y)
        pipe.settle()
        named = pipe.named_parameters()
        found.append((result.loss, {name: one.grad.clone() for name, one in named if one.grad is not None}))
    return found


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", sorted(ZOO.keys() - ONLY_BY_CHECK))
def test_right_or_refused(name: str, schedule: str) -> None:
    entry = ZOO[name]
    settings = entry.settings or {}
    with nullcontext() if entry.ambient is None else entry.ambient():
        if entry.refused and not (entry.either and schedule != "zb-v"):
            with pytest.raises(ModelError, match=rf"(?s){entry.refused}"):
                piped(entry, schedule, settings)
            return
        expected = plain(entry, settings)
        _as_before()
        ours = piped(entry, schedule, settings)
    tolerance = settings.get("tolerance", 1e-4)
    for step, ((loss, gradients), (own_loss, own)) in enumerate(zip(expected, ours, strict=True)):
        torch.testing.assert_close(own_loss, loss, rtol=tolerance, atol=1e-6, msg=f"the loss of step {step}")
        assert own.keys() == gradients.keys(), f"step {step}"
        for key, one in gradients.items():
            torch.testing.assert_close(own[key], one, rtol=tolerance, atol=1e-5, msg=f"{key} in step {step}")


def _as_before() -> None:
    zoo.FACTOR, zoo.ClassLevel.factor = 1.0, 1.0
    zoo.SETTINGS["scale"] = 1.0
