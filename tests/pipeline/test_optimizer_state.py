"""An optimizer's state by parameter name: it fits any schedule and cut, and one by position is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.core.errors import ModelError, RunError
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from torch_models import data, mlp

pytestmark = pytest.mark.torch


def trained(pipe: Pipeline, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    batch, target = data(8)
    losses = []
    for _ in range(steps):
        loss = pipe.step(batch, target=target).loss
        assert loss is not None
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def pipeline(schedule: str = "1f1b", **settings: Any) -> Pipeline:
    settings = {"num_ranks": 2, "num_microbatches": 4} | settings
    return Pipeline(mlp(8), loss_fn=functional.mse_loss, schedule=schedule, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "zb-v"},  # in which the ranks' stages stand in another order
        {"schedule": "1f1b", "balance": [1, 7]},
        {"schedule": "interleaved-1f1b", "stages_per_rank": 2},
        {"schedule": "gpipe", "num_ranks": 4},
    ],
)
def test_a_state_loads_into_another_schedule_and_cut(settings: dict[str, Any]) -> None:
    first = pipeline()
    optimizer = first.optimizer(torch.optim.AdamW, lr=1e-2)
    trained(first, optimizer, 3)
    weights, state = copy.deepcopy(first.state_dict()), copy.deepcopy(optimizer.state_dict())
    assert list(state["state"]) == [name for name, _ in first.named_parameters()]
    expected = trained(first, optimizer, 3)
    second = pipeline(**settings)
    second.load_state_dict(weights)
    other = second.optimizer(torch.optim.AdamW, lr=1.0)
    other.load_state_dict(state)
    assert trained(second, other, 3) == pytest.approx(expected, rel=1e-6)
    assert other.state_dict()["state"].keys() == state["state"].keys()


def test_the_states_of_several_ranks_are_joined_by_their_names() -> None:
    pipe = pipeline()
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
    trained(pipe, optimizer, 1)
    whole = optimizer.state_dict()
    names = list(whole["state"])
    ranks: list[dict[str, Any]] = [
        {
            "state": {name: whole["state"][name] for name in some},
            "param_groups": [{**whole["param_groups"][0], "params": list(some)}],
        }
        for some in (names[:10], names[10:])
    ]
    joined = {"state": ranks[0]["state"] | ranks[1]["state"], "param_groups": ranks[0]["param_groups"]}
    optimizer.load_state_dict(joined)
    assert optimizer.state_dict()["param_groups"] == whole["param_groups"]
    with refused(ModelError, rf"the optimizer's state has no '{names[10]}'"):
        optimizer.load_state_dict(ranks[0])


def test_a_state_by_position_is_refused() -> None:
    pipe = pipeline()
    plain = torch.optim.SGD(pipe.parameters(), lr=0.1)
    with refused(ModelError, "is indexed by position"):
        pipe.optimizer(torch.optim.SGD, lr=0.1).load_state_dict(plain.state_dict())
    with refused(ModelError, "without state and param_groups"):
        pipe.optimizer(torch.optim.SGD, lr=0.1).load_state_dict({})


def test_groups_of_the_users_own_keep_their_settings() -> None:
    pipe = pipeline()
    named = list(pipe.named_parameters())
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    held = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["params"] = held[::2]
    optimizer.add_param_group({"params": held[1::2], "lr": 0.5})
    state = optimizer.state_dict()
    assert state["param_groups"][1]["params"] == [name for name, _ in named[1::2]]
    state["param_groups"] = state["param_groups"][::-1]  # groups go by name as well
    optimizer.load_state_dict(state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with refused(RunError, "a parameter that is not the pipeline's"):
        optimizer.state_dict()


@pytest.mark.features("precision")
def test_float32_copies_go_by_their_parameters_names() -> None:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).bfloat16()
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_ranks=2, num_microbatches=4, master_weights=True)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    batch, target = (tensor.bfloat16() for tensor in data(8))
    pipe.step(batch, target=target)
    optimizer.step()
    state = optimizer.state_dict()
    assert list(state["state"]) == [name for name, _ in model.named_parameters()]
    optimizer.load_state_dict(state)
