"""Parameters that a step does not reach, and losses with parameters of their own."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError, UsageError
from drumline.pipeline.pipeline import Pipeline
from refused import refused

pytestmark = pytest.mark.torch


class Experts(nn.Module):
    """Sends every row to one of its experts; those that get none are not called."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        made = x.clone()
        chosen = (x[:, 0] > 0).long() + (x[:, 0] > 5).long()  # the last one gets nothing as a rule
        for number, expert in enumerate(self.experts):
            rows = chosen == number
            if rows.any():
                made[rows] = made[rows] + torch.tanh(expert(x[rows]))
        return made


def experts() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(4) for layer in (Experts(), nn.Linear(4, 4))))


SCHEDULES = ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_expert_without_tokens_has_no_gradient_and_training_goes_on(schedule: str) -> None:
    model = experts()
    reference = copy.deepcopy(model)
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=schedule, num_ranks=2, num_microbatches=4)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    own = torch.optim.AdamW(reference.parameters(), lr=0.01)
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        x[3:, 0] = -x[3:, 0].abs()  # some microbatches reach an expert that others do not
        torch.autograd.backward(functional.mse_loss(reference(x), x))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipe.step(x, target=x)
            norm = pipe.clip_grad_norm_(1.0)
        wanted = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        assert torch.allclose(norm, wanted, rtol=1e-5)
        expected = dict(reference.named_parameters())
        for name, param in pipe.named_parameters():
            other = expected[name].grad
            assert (param.grad is None) == (other is None), name
            assert param.grad is None or torch.allclose(param.grad, other, atol=1e-6), name  # type: ignore[arg-type]
        assert any(param.grad is None for _, param in pipe.named_parameters())
        optimizer.step()
        own.step()
        optimizer.zero_grad()
        own.zero_grad()


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.spare = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.two(self.one(x))
        return made


def spare(**settings: Any) -> Pipeline:
    model = Spare()
    return Pipeline(
        model,
        loss_fn=functional.mse_loss,
        num_ranks=2,
        num_microbatches=2,
        example=torch.ones(4, 4),
        balance="even",
        **settings,
    )


def test_a_parameter_that_the_forward_never_uses_is_named_once() -> None:
    pipe = spare()
    x = torch.randn(4, 4)
    pipe.step(x, target=x)
    with pytest.warns(
        UserWarning, match=r"no loss reaches spare\.bias, spare\.weight, and the forward never uses them"
    ):
        pipe.settle()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(12):
            pipe.step(x, target=x)
            pipe.settle()


def test_parameters_of_a_chain_that_no_step_has_reached_are_named_after_a_while() -> None:
    pipe = Pipeline(experts(), loss_fn=functional.mse_loss, num_ranks=2, num_microbatches=2)
    x = -torch.rand(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(9):
            pipe.step(x, target=x)
            pipe.settle()
    pipe.step(x, target=x)
    with pytest.warns(UserWarning, match=r"no loss reaches 0\.experts.* in any step so far"):
        pipe.settle()


def test_the_switch() -> None:
    x = torch.randn(4, 4)
    pipe = spare(unused="raise")
    pipe.step(x, target=x)
    with refused(ModelError, r"no loss reaches spare\.bias, spare\.weight", fix=r"requires_grad_\(False\)"):
        pipe.settle()
    quiet = spare(unused="ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet.step(x, target=x)
        quiet.settle()
    with refused(UsageError, "unused is 'quiet'", expected='"warn", "raise" or "ignore"'):
        spare(unused="quiet")


# ---- a loss with parameters ------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    """Learns how much its two parts count."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.project = nn.Linear(4, 4)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(self.project(output), target) * torch.exp(-self.scale) + self.scale


@pytest.mark.parametrize("checkpoint", ["none", "full"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_with_parameters_is_trained_with_the_last_stage(schedule: str, checkpoint: str) -> None:
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), Scaled()
    reference, its_loss = copy.deepcopy(model), copy.deepcopy(loss_fn)
    pipe = Pipeline(model, loss_fn=loss_fn, schedule=schedule, num_ranks=2, num_microbatches=4, checkpoint=checkpoint)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    own = torch.optim.SGD([*reference.parameters(), *its_loss.parameters()], lr=0.1)
    for step in range(2):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        whole = its_loss(reference(x), x)
        torch.autograd.backward(whole)
        loss = pipe.step(x, target=x).loss
        assert loss is not None
        assert torch.allclose(loss, whole, rtol=1e-5)
        norm = pipe.clip_grad_norm_(0.5)
        wanted = nn.utils.clip_grad_norm_([*reference.parameters(), *its_loss.parameters()], 0.5)
        assert torch.allclose(norm, wanted, rtol=1e-5)
        expected = {**dict(reference.named_parameters()), **dict(its_loss.named_parameters(prefix="loss_fn"))}
        assert dict(pipe.named_parameters()).keys() == expected.keys()
        optimizer.step()
        own.step()
        optimizer.zero_grad()
        own.zero_grad()
        for name, param in pipe.named_parameters():
            assert torch.allclose(param, expected[name], atol=1e-6), name
    assert "loss_fn.scale" in pipe.state_dict()
