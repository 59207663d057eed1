"""Microbatches of different lengths of which some count no labels, against a loop of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl

pytestmark = [pytest.mark.torch]
WORDS, IGNORED, LENGTHS, ROWS = 6, -100, (5, 4, 5, 4), 2
EMPTY: dict[str, tuple[int, ...]] = {"all": (0, 1, 2, 3), "the first": (0,), "all but the last": (0, 1, 2), "none": ()}


def summed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum")


def of_rows(output: Tensor, target: Tensor) -> Tensor:
    """A sum over places, and a mean over rows."""
    return summed(output, target) / len(target)


# What the microbatches' losses are multiplied by to come to that of all.
LOSSES = {"sum": (summed, 1.0), "sum over places": (of_rows, 1 / len(LENGTHS))}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, 4), nn.Linear(4, WORDS)).double()


def batch(empty: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    x, y = ([torch.randint(WORDS, (ROWS, length)) for length in LENGTHS] for _ in range(2))
    for at in empty:
        y[at].fill_(IGNORED)
    return x, y


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("empty", [("all", "none"), ("the first", "all"), ("all but the last", "the first")])
def test_sums_of_microbatches_without_labels_are_those_of_a_plain_loop(loss: str, empty: tuple[str, str]) -> None:
    function, share = LOSSES[loss]
    plain, found, wanted = model(), list[Any](), list[Any]()
    with dl.Pipeline(model(), loss_fn=function, num_ranks=2, num_microbatches=4, balance="even", device="cpu") as pipe:
        for pattern in empty:
            x, y = batch(EMPTY[pattern])
            told = pipe.step(dl.Microbatches(x), target=dl.Microbatches(y))
            assert told.loss is not None
            found.append(float(told.loss))
            each = [function(plain(tensor), two) * share for tensor, two in zip(x, y, strict=True)]
            torch.autograd.backward(torch.stack(each).sum())
            wanted.append(float(torch.stack(each).sum().detach()))
        assert found == pytest.approx(wanted, rel=1e-10)
        gradients = dict(pipe.named_parameters())
    assert gradients.keys() == dict(plain.named_parameters()).keys()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(gradients[name].grad, param.grad, rtol=1e-10, atol=1e-12)
