"""What stops an optimizer, on every rank: other batches, a NaN in the loss alone, parameters that nothing reaches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import MismatchError, ModelError, NonFiniteError
from drumline.core.program import Program
from drumline.engine.program.find import edges_of
from drumline.engine.program.frozen import Frozen
from drumline.engine.ranks.transports import agree
from drumline.model.block import Block
from drumline.pipeline.pipeline import Pipeline
from drumline.schedules import generate
from refused import refused
from some import some
from torch_models import data, mlp

pytestmark = pytest.mark.torch


def pipeline(model: nn.Module | None = None, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_ranks": 2, **settings}
    return Pipeline(mlp() if model is None else model, **given)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_rank_must_have_been_given_the_same(rank: int) -> None:
    told = [{"seed": 0, "model": "a"} for _ in range(4)]
    agree(told)
    told[rank]["model"] = "b"
    with refused(MismatchError, f"ranks 0 and {rank} disagree on model: a and b"):
        agree(told)


def test_ranks_with_two_copies_of_a_stage_are_connected() -> None:
    # Messages go between neighbours; the copies of stage 0 are on the first rank and the last.
    found = edges_of(generate("dualpipe", num_ranks=4, num_microbatches=8))
    assert {(0, 3), (3, 0), (1, 2), (2, 1)} <= set(found)
    assert (0, 2) not in found


def test_a_loss_that_is_nan_stops_the_optimizer_though_all_gradients_are_finite() -> None:
    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        return loss + (loss * math.nan).detach()

    pipe = pipeline(loss_fn=loss_fn)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    batch, target = data(8)
    pipe.step(batch, target=target)
    gradients = [param.grad for param in pipe.parameters() if param.grad is not None]
    assert all(bool(gradient.isfinite().all()) for gradient in some(gradients))
    with pytest.raises(NonFiniteError):
        optimizer.step()


class Skips(nn.Module):
    """Uses its second layer only as long as it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.uses = nn.Linear(6, 6), nn.Linear(6, 6), True

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.first(x)
        return self.second(made) if self.uses else made


def test_a_parameter_that_was_exchanged_has_to_be_reached_too() -> None:
    block = Skips()
    pipe = pipeline(nn.Sequential(nn.Linear(6, 6), block), unused="raise")
    batch, target = data(8)
    pipe.step(batch, target=target)
    pipe.settle()
    pipe.zero_grad()
    block.uses = False
    block.second.weight = nn.Parameter(torch.zeros(6, 6))
    pipe.step(batch, target=target)
    with refused(ModelError, r"no loss reaches 1\.second"):
        pipe.settle()


def test_a_frozen_parameter_of_any_stage_that_is_freed_is_refused() -> None:
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    cuts = [[Block("0", frozen)], [Block("1", trained)]]
    held = Frozen(Program.parse("0F0,0B0\n1F0,1B0"), cuts)
    held.check_still([])
    frozen.bias.requires_grad_(True)
    with refused(ModelError, r"0\.bias was frozen when the pipeline was created"):
        held.check_still([])  # also where its stage is another process's


def test_an_optimizer_that_stepped_before_there_was_a_pipeline_is_stopped() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, target = data(8)
    torch.autograd.backward(functional.mse_loss(model(batch), target))
    optimizer.step()
    optimizer.zero_grad()
    pipe = pipeline(model)
    pipe.step(batch * math.inf, target=target)
    with pytest.raises(NonFiniteError):
        optimizer.step()
