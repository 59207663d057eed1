"""How much each microbatch and each step counts in a loss and its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import BatchError
from drumline.engine.loss.own_loss import OwnWeight
from drumline.model.follow.inputs import Inputs
from drumline.model.microbatches import Microbatches
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from torch_models import data, mlp

pytestmark = pytest.mark.torch


def pipeline(model: nn.Module | None = None, **settings: Any) -> Pipeline:
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "num_ranks": 2, **settings}
    return Pipeline(mlp() if model is None else model, **given)


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
    batch, target = (tensor.double() for tensor in data(7))
    whole = functional.mse_loss(model(batch), target)
    result = pipeline(model, num_microbatches=3).step(batch, target=target)
    assert result.loss is not None
    torch.testing.assert_close(result.loss, whole.detach(), rtol=1e-14, atol=0.0)


def check_step(pipe: Pipeline, model: nn.Module, num_rows: int) -> None:
    """Compare loss and gradients of a step with those of the unsplit model."""
    batch, target = data(num_rows)
    whole = functional.mse_loss(model(batch), target)
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    model.zero_grad()
    result = pipe.step(batch, target=target)
    torch.testing.assert_close(result.loss, whole.detach())
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_steps_with_other_rows_have_other_shares() -> None:
    model = mlp(2)
    pipe = pipeline(model)
    for num_rows in (8, 8, 8, 7, 9, 9, 9, 8, 8):
        check_step(pipe, model, num_rows)


def test_shares_are_those_of_the_step_after_one_that_failed() -> None:
    model = mlp(2)
    pipe = pipeline(model)
    for num_rows in (7, 7, 7):
        check_step(pipe, model, num_rows)
    with refused(BatchError, "the batch has 9 rows and the target has 10"):
        pipe.step(data(9)[0], target=data(10)[1])
    with refused(BatchError, "the batch has 3 rows for 4 microbatches"):
        pipe.step(data(3)[0], target=data(3)[1])
    for num_rows in (7, 10, 7):
        check_step(pipe, model, num_rows)


def test_shares_are_equal_again_after_microbatches_that_the_user_cut() -> None:
    model = mlp(2)
    pipe = pipeline(model)
    batch, target = (Microbatches(torch.split(tensor, [1, 1, 1, 5])) for tensor in data(8))
    for _ in range(2):
        pipe.step(batch, target=target)
        for _ in range(2):
            check_step(pipe, model, 8)


@pytest.mark.features("precision")
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_of_two_steps_add_up_whatever_the_scale(precision: str) -> None:
    batch, target = data(8)
    once, twice = pipeline(precision=precision), pipeline(precision=precision)
    once.step(batch, target=target)
    for _ in range(2):
        twice.step(batch, target=target)
    for param, other in zip(once.parameters(), twice.parameters(), strict=True):
        assert param.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(2 * param.grad, other.grad)


def test_evaluation_draws_nothing_and_leaves_modules_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5))
    model[3].eval()
    pipe = pipeline(model)
    batch, _ = data(8)
    found = [pipe.eval_step(batch).output for _ in range(2)]
    assert torch.equal(found[0], found[1])
    assert [module.training for module in model] == [True, True, True, False]


@pytest.mark.parametrize("num_rows", [5, 7, 8, 12])
def test_microbatches_of_other_sizes_may_follow_plain_steps(num_rows: int) -> None:
    """What a mean was seen to average over is counted with the rows on which it was seen, which may be fewer."""
    model = mlp(2)
    pipe = pipeline(model)
    check_step(pipe, model, num_rows)
    model.zero_grad()
    batch, target = data(8)
    whole = functional.mse_loss(model(batch), target)
    wanted = torch.autograd.grad(whole, list(model.parameters()))
    cut = [Microbatches([tensor[:1], tensor[1:2], tensor[2:3], tensor[3:]]) for tensor in (batch, target)]
    result = pipe.step(cut[0], target=cut[1])
    torch.testing.assert_close(result.loss, whole.detach())
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
