"""More losses, in float64 with uneven microbatches, against the plain model on the whole batch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError
from drumline.pipeline.pipeline import Pipeline
from more_losses import DOUBTFUL, FAIR, ROWS, UNFAIR, WIDTH, chance

pytestmark = pytest.mark.torch
COUNTS = (2, 4, 5)  # of microbatches: none divides the rows


def body() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


def trained(loss_fn: Any, make: Any, count: int) -> None:
    """Run two steps, the second with padding, and compare loss and gradients with the plain model's."""
    plain, mine = body(), copy.deepcopy(loss_fn)
    loss_fn = copy.deepcopy(loss_fn)
    pipe = Pipeline(
        body(), loss_fn=mine, num_microbatches=count, num_ranks=2, transport="in-process", device="cpu"
    )  # fmt: skip
    for step in range(2):
        x = torch.randn(ROWS, 5, generator=chance(step, 9), dtype=torch.float64)
        loss = pipe.step(x, target=make(step)).loss
        wanted: Tensor = loss_fn(plain(x), make(step))
        torch.autograd.backward(wanted)
        torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-12)
        named = dict(plain.named_parameters())
        if isinstance(loss_fn, nn.Module):
            named |= {f"loss_fn.{name}": one for name, one in loss_fn.named_parameters()}
        for name, one in pipe.named_parameters():
            torch.testing.assert_close(one.grad, named[name].grad, rtol=1e-8, atol=1e-11)
            one.grad = named[name].grad = None


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("name", FAIR)
def test_a_mean_or_sum_is_that_of_the_whole_batch(name: str, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(*FAIR[name], count)


@pytest.mark.parametrize("name", UNFAIR)
def test_what_mixes_rows_is_refused(name: str) -> None:
    loss_fn, make = UNFAIR[name]
    count = COUNTS[list(UNFAIR).index(name) % 3]
    with pytest.raises(DrumlineError, match=r"of the full batch|averages over different"):
        trained(loss_fn, make, count)


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_decides_by_values_is_never_wrong(name: str) -> None:
    with pytest.raises(DrumlineError, match=r"pass loss_weight="):
        trained(*DOUBTFUL[name], 4)
