"""States of the whole model on every rank: weights and the optimizer's state are those of training in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.pipeline.whole import load_whole_state, refresh, whole_state

pytestmark = [pytest.mark.torch, pytest.mark.slow]
STEPS = 3


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def in_one_process() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Train by plain PyTorch; return the weights and the optimizer's state."""
    model = chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def on_ranks(steps: int, state: dict[str, Any] | None) -> tuple[dict[str, Tensor], dict[str, Any], dict[str, Any]]:
    """Train these last steps on ranks, from a state if there is one; return what each rank then has of the whole."""
    model = chain()
    if state is not None:
        model.load_state_dict(state["weights"])
    settings: dict[str, Any] = {"schedule": "1f1b", "num_microbatches": 2, "check_model": False}
    pipe = dl.Pipeline(model, loss_fn=nn.functional.mse_loss, **settings)
    optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
    if state is not None:
        load_whole_state(pipe, model, optimizer, state["optimizer"])
    for step in range(STEPS - steps, STEPS):
        pipe.zero_grad()
        x, y = batch(step)
        pipe.step(x, target=y)
        optimizer.step()
    refresh(pipe, model)
    wanted, unwanted = (whole_state(pipe, model, optimizer, is_wanted=wanted) for wanted in (True, False))
    return {name: value.clone() for name, value in model.state_dict().items()}, wanted, unwanted


def assert_alike(own: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert own["param_groups"][0]["params"] == wanted["param_groups"][0]["params"]
    assert own["state"].keys() == wanted["state"].keys()
    for position, entry in wanted["state"].items():
        torch.testing.assert_close(own["state"][position], entry)


def test_every_rank_has_the_weights_and_the_optimizers_state_of_one_process() -> None:
    weights, state = in_one_process()
    for own_weights, whole, unwanted in dl.launch(on_ranks, STEPS, None, num_ranks=2):
        torch.testing.assert_close(own_weights, dict(weights))
        assert_alike(whole, state)
        assert not any(isinstance(value, Tensor) for entry in unwanted["state"].values() for value in entry.values())


def test_a_state_of_one_process_goes_on_in_a_pipeline() -> None:
    weights, state = in_one_process()
    model = chain()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = batch(0)
    nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    first = {"weights": model.state_dict(), "optimizer": optimizer.state_dict()}
    own_weights, whole, _ = on_ranks(STEPS - 1, first)
    torch.testing.assert_close(own_weights, dict(weights))
    assert_alike(whole, state)
