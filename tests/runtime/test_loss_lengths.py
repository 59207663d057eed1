"""What other lengths tell of a loss: whether it averages over elements, over rows, or here over nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drumline.engine.loss.rules.lengths import NOTHING, lengths_of
from drumline.engine.loss.rules.rules import ROWS, SIZE

pytestmark = pytest.mark.torch


def mean(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output, target)


def mean_over_rows(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().sum() / len(target)


def nothing(output: Tensor, target: Tensor) -> Tensor:
    return (output * 0.0).sum()


@pytest.mark.parametrize(("loss_fn", "says"), [(mean, SIZE), (mean_over_rows, ROWS), (nothing, NOTHING)])
def test_half_of_each_row_tells_what_a_loss_averages_over(loss_fn: Callable[..., Tensor], says: str) -> None:
    torch.manual_seed(0)
    output, target = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    found = lengths_of(loss_fn, output, target, torch.device("cpu"))
    assert found is not None
    assert {*found.parts, found.rest} - {NOTHING} == {says} - {NOTHING}
    assert NOTHING in (*found.parts, found.rest)
