"""What two equal ranks and good batches do not show: the third rank, a loss alone, other programs, old optimizers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import MismatchError, ModelError, NonFiniteError
from drumline.core.measured.record import BETWEEN
from drumline.core.program import Program
from drumline.pipeline.loss.own_loss import OwnWeight
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.programs import edges_of
from drumline.pipeline.record.recording import Between
from drumline.pipeline.record.tally import Tally, Told
from drumline.pipeline.state.frozen import Frozen
from drumline.pipeline.transports import agree
from drumline.runtime.blocks.cut import Block
from drumline.runtime.draft import Clock, Draft
from drumline.runtime.follow.inputs import Inputs
from drumline.schedules import generate
from records import two_ranks
from some import some
from torch_models import data, mlp

pytestmark = pytest.mark.torch


def pipeline(model: nn.Module | None = None, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_ranks": 2, **settings}
    return Pipeline(mlp() if model is None else model, **given)


# ---- what ranks agree on ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_every_rank_must_have_been_given_the_same(rank: int) -> None:
    told = [{"seed": 0, "model": "a"} for _ in range(4)]
    agree(told)
    told[rank]["model"] = "b"
    with pytest.raises(MismatchError, match=f"ranks 0 and {rank} disagree on model: a and b"):
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
    gradients = [one.grad for one in pipe.parameters() if one.grad is not None]
    assert all(bool(one.isfinite().all()) for one in some(gradients))
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
    with pytest.raises(ModelError, match=r"no loss reaches 1\.second"):
        pipe.settle()


def test_a_frozen_parameter_of_any_stage_that_is_freed_is_refused() -> None:
    frozen, trained = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)
    cuts = [[Block("0", frozen)], [Block("1", trained)]]
    held = Frozen(Program.parse("0F0,0B0\n1F0,1B0"), cuts)
    held.check_still([])
    frozen.bias.requires_grad_(True)
    with pytest.raises(ModelError, match=r"0\.bias was frozen when the pipeline was created"):
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


# ---- what counts how much --------------------------------------------------------------------------------------------


def ForCausalLMLoss(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class NextToken(nn.Module):
    """Computes its loss itself, against the token that comes next."""

    loss_function: Any = staticmethod(ForCausalLMLoss)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        made = nn.functional.one_hot(input_ids, 9).float()
        return {"loss": self.loss_function(made, labels), "logits": made} if labels is not None else {"logits": made}


def test_labels_count_but_for_those_that_are_ignored_and_the_first() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [-100, -100, 3, -100]])
    ids = labels.clamp(min=0)
    by_name, in_order = Inputs((ids,), {"labels": labels}), Inputs((ids, labels), {})
    for inputs in (by_name, in_order):
        assert int(OwnWeight(NextToken())(inputs)) == 2 + 1

    class SameToken(NextToken):
        @staticmethod
        def loss_function(logits: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    assert int(OwnWeight(SameToken())(by_name)) == 3 + 1


def test_shares_of_a_double_precision_loss_are_exact() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()
    batch, target = (one.double() for one in data(7))
    whole = functional.mse_loss(model(batch), target)
    result = pipeline(model, num_microbatches=3).step(batch, target=target)
    assert result.loss is not None
    torch.testing.assert_close(result.loss, whole.detach(), rtol=1e-14, atol=0.0)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_of_two_steps_add_up_whatever_the_scale(precision: str) -> None:
    batch, target = data(8)
    once, twice = pipeline(precision=precision), pipeline(precision=precision)
    once.step(batch, target=target)
    for _ in range(2):
        twice.step(batch, target=target)
    for one, other in zip(once.parameters(), twice.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(2 * one.grad, other.grad)


def test_evaluation_draws_nothing_and_leaves_modules_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
    model[3].eval()
    pipe = pipeline(model)
    batch, _ = data(8)
    found = [pipe.eval_step(batch).output for _ in range(2)]
    assert torch.equal(found[0], found[1])
    assert [one.training for one in model] == [True, True, True, False]


# ---- records ---------------------------------------------------------------------------------------------------------


def test_tokens_per_second_are_those_of_a_device() -> None:
    program = Program.parse("0F0,0B0\n1F0,1B0")
    told = [Told(record=record) for record in two_ranks()]
    told[0].num_rows, told[0].num_tokens = 8, 400
    line = Tally(0, lambda: told, program).metrics({})
    seconds = line["time_metrics/end_to_end(s)"]
    assert line["throughput(rows/s)"] == pytest.approx(8 / seconds)
    assert line["throughput(tps)"] == pytest.approx(400 / seconds / 2)


class Ticks(Clock):
    """Shows one nanosecond more whenever it is looked at."""

    def __init__(self) -> None:
        self.shown = 0

    def now(self) -> int:
        self.shown += 1
        return self.shown


def test_what_was_under_way_when_a_step_began_is_over_then() -> None:
    between, drafts = Between([Ticks()]), [Draft(0), Draft(0)]
    between.enter("update")
    between.hand_over(drafts[:1])  # a step inside of an optimizer's step
    between.leave()
    with between.during("clip"):
        pass
    between.hand_over(drafts[1:])
    kinds = [[BETWEEN[kind] for kind in draft.between[::3]] for draft in drafts]
    assert kinds == [["update"], ["clip"]]
