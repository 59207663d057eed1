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

from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, ModelError
from drumline.pipeline.pipeline import Pipeline
from matrices import ALL, chosen, long
from refused import misses, refused
from zoo import ONLY_BY_CHECK, WIDTH, ZOO, Entry, memory

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]
SCHEDULES = ("1f1b", "zb-h1", "zb-v")
STEPS = 3
# All must hold without the check of the first step against the model.
UNCHECKED: dict[str, Any] = {"check_model": False}
ANIMALS = sorted(ZOO.keys() - ONLY_BY_CHECK)
SOME = ANIMALS if ALL else ANIMALS[::3]
# `make matrices` tries all three schedules, other runs the one of most stages with split backwards, and another one of
# them for every third animal. What is refused while the model is followed is refused before there is a schedule.
CASES = sorted(
    {(name, "zb-v") for name in ANIMALS}
    | {(name, schedule) for name, schedule in chosen(SOME, SCHEDULES, times=1) if not ZOO[name].refused}
    | {(name, schedule) for name in ANIMALS for schedule in SCHEDULES if ZOO[name].either}
)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Put back what animals change outside of themselves."""
    yield
    memory.FACTOR, memory.ClassLevel.factor = 1.0, 1.0
    memory.SETTINGS["scale"] = 1.0


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
    for step in range(STEPS if entry.change is not None else 1):
        if entry.change is not None:
            entry.change(model, step)
        model.zero_grad()
        x, y = data(step)
        total = torch.zeros(())
        for tensor, wanted in zip(x.chunk(4), y.chunk(4), strict=True):
            with torch.autocast("cpu", torch.bfloat16) if low else nullcontext():
                loss = functional.mse_loss(model(tensor).float(), wanted) / 4
            torch.autograd.backward(loss)
            total += loss.detach()
        named = model.named_parameters()
        found.append((total, {name: param.grad.clone() for name, param in named if param.grad is not None}))
    return found


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


def piped(
    entry: Entry, schedule: str, settings: dict[str, Any], num_ranks: int | None = 2
) -> list[tuple[Any, dict[str, Tensor]]]:
    model, found = made(entry), list[tuple[Any, dict[str, Tensor]]]()
    given = {**UNCHECKED, **{name: setting for name, setting in settings.items() if name != "tolerance"}}
    example = data(0)[0] if entry.example else None
    pipe = Pipeline(
        model, loss_fn=loss_of, schedule=schedule, num_microbatches=4, num_ranks=num_ranks, example=example,
        balance="even", **given,
    )  # fmt: skip
    for step in range(STEPS if entry.change is not None else 1):
        if entry.change is not None:
            entry.change(model, step)
        pipe.zero_grad()
        x, y = data(step)
        result = pipe.step(x, target=y)
        pipe.settle()
        named = pipe.named_parameters()
        found.append((result.loss, {name: param.grad.clone() for name, param in named if param.grad is not None}))
    return found


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(("name", "schedule"), CASES)
def test_right_or_refused(name: str, schedule: str) -> None:
    entry = ZOO[name]
    settings = entry.settings or {}
    with nullcontext() if entry.ambient is None else entry.ambient():
        if entry.refused and not (entry.either and schedule != "zb-v"):
            with refused(ModelError, **entry.refused):
                piped(entry, schedule, settings)
            return
        expected = plain(entry, settings)
        _as_before()
        ours = piped(entry, schedule, settings)
    compare(expected, ours, settings.get("tolerance", 1e-4))


@pytest.mark.parametrize("name", sorted(ONLY_BY_CHECK))
def test_the_check_of_the_first_step_sees_what_nothing_else_can(name: str) -> None:
    with pytest.raises(ModelError):
        piped(ZOO[name], "1f1b", {"check_model": True})


def _as_before() -> None:
    memory.FACTOR, memory.ClassLevel.factor = 1.0, 1.0
    memory.SETTINGS["scale"] = 1.0


def compare(expected: list[Any], ours: list[Any], tolerance: float, *, whole: bool = True) -> None:
    """Compare every step's loss and gradients; not `whole`, those that a rank has."""
    for step, ((loss, gradients), (own_loss, own)) in enumerate(zip(expected, ours, strict=True)):
        torch.testing.assert_close(own_loss, loss, rtol=tolerance, atol=1e-6, msg=f"the loss of step {step}")
        assert own.keys() == gradients.keys() if whole else own.keys() <= gradients.keys(), f"step {step}"
        for key, value in own.items():
            torch.testing.assert_close(value, gradients[key], rtol=tolerance, atol=1e-5, msg=f"{key} in step {step}")


RANKS = (
    "a backward hook on a block",
    "hooks collect features in a local list, twice",
    "a hook on a container that comes and goes",
    "an annealed attribute",
    "an exchanged buffer",
    "a branch on grad_fn",
    "a branch on what blocks hand over transposed",
    "reentrant checkpoints between blocks",
    "a function that calls a block it is given",
    "a function that calls a block in a closure",
    "a buffer changed in one stage and read in another",
    "an exchanged block",
    "a list that blocks append to",
)


def on_rank(names: tuple[str, ...]) -> dict[str, Any]:
    """Return what comes of animals on this rank: losses and gradients, or the refusal."""
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = piped(ZOO[name], "1f1b", ZOO[name].settings or {}, None)
        except DrumlineError as error:
            found[name] = error
    return found


@long
@pytest.mark.cold_ranks
def test_on_two_processes_they_end_alike() -> None:
    each = launch(on_rank, RANKS, num_ranks=2)
    for name in RANKS:
        entry = ZOO[name]
        told = [found[name] for found in each]
        if not entry.refused:
            for found in told:
                compare(plain(entry, entry.settings or {}), found, 1e-4, whole=False)
        else:
            assert all(isinstance(report, DrumlineError) for report in told), (name, told)
            assert any(isinstance(item, ModelError) and not misses(item, entry.refused) for item in told), (name, told)


COPIED = {
    "an annealed attribute of a block": "",
    "a hook that comes and goes": "",
    "a counter inside of blocks": "changes its attribute 'count'",
    "averages inside of blocks": "changes the buffer 'blocks.0.mean', which several ranks hold",
}


@pytest.mark.parametrize("name", COPIED)
def test_two_copies_of_a_stage_follow_the_model(name: str) -> None:
    entry = ZOO[name]
    if words := COPIED[name]:
        with refused(ModelError, words):
            piped(entry, "dualpipe", {})
        return
    compare(plain(entry, {}), piped(entry, "dualpipe", {}), 1e-4)
