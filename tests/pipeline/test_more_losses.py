"""More losses, in float64 with uneven microbatches, against the plain model on the whole batch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nf

from drumline.core.errors import DrumlineError, ModelError
from drumline.engine.loss.comparing import Comparing
from drumline.pipeline.pipeline import Pipeline
from matrices import matrix
from more_losses import DOUBTFUL, FAIR, ROWS, UNFAIR, WIDTH, chance
from refused import refused

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
            named |= {f"loss_fn.{name}": param for name, param in loss_fn.named_parameters()}
        for name, param in pipe.named_parameters():
            torch.testing.assert_close(param.grad, named[name].grad, rtol=1e-8, atol=1e-11)
            param.grad = named[name].grad = None


@matrix("count, name", COUNTS, FAIR, times=1)
def test_a_mean_or_sum_is_that_of_the_whole_batch(name: str, count: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(*FAIR[name], count)


@pytest.mark.parametrize("name", UNFAIR)
def test_what_mixes_rows_is_refused(name: str) -> None:
    loss_fn, make = UNFAIR[name]
    count = COUNTS[list(UNFAIR).index(name) % 3]
    with refused(DrumlineError, r"of the full batch|averages over different"):
        trained(loss_fn, make, count)


@pytest.mark.parametrize("name", DOUBTFUL)
def test_what_decides_by_values_is_never_wrong(name: str) -> None:
    with refused(DrumlineError, fix=r"pass loss_weight="):
        trained(*DOUBTFUL[name], 4)


def counted(o: Tensor, t: Tensor) -> Tensor:
    return nf.cross_entropy(o, t, ignore_index=-1, reduction="sum") / (t != -1).sum().clamp(min=1)


def counted_on_the_host(o: Tensor, t: Tensor) -> Tensor:
    return nf.cross_entropy(o, t, ignore_index=-1, reduction="sum") / max(int((t != -1).sum()), 1)


def added(o: Tensor, t: Tensor) -> Tensor:
    return nf.cross_entropy(o, t, ignore_index=-1, reduction="sum")


def masked(o: Tensor, t: Tensor) -> Tensor:
    mask = (t >= 0).double()
    return (nf.cross_entropy(o, t.clamp(min=0), reduction="none") * mask).sum() / (mask.sum() + 1e-9)


@matrix("empty, loss_fn", [(0,), (0, 1), (1, 3), (0, 2, 3)], [counted, counted_on_the_host, added, masked], times=1)
def test_sums_of_nothing_tell_no_rule(loss_fn: Any, empty: tuple[int, ...]) -> None:
    def make(step: int) -> Tensor:
        labels = torch.randint(WIDTH, (ROWS,), generator=chance(step, 1))
        labels[::3] = -1
        for number in empty if step == 0 else (3 - empty[0],):
            for place in range(5 * number, min(5 * number + 5, ROWS)):
                labels[place] = -1
        return labels

    trained(loss_fn, make, 4)


@matrix("loss_fn, late", [counted, counted_on_the_host, added, masked], [0, 1], times=1)
def test_a_batch_of_nothing_fixes_no_rule(loss_fn: Any, late: int) -> None:
    def make(step: int) -> Tensor:
        labels = torch.randint(WIDTH, (ROWS,), generator=chance(step, 1))
        labels[: 7 if step == late else ROWS] = -1
        return labels

    trained(loss_fn, make, 4)


def energies(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    place, energy = o
    (force,) = torch.autograd.grad(energy.sum(), place, create_graph=True)
    return (force - t).pow(2).sum() / len(t) + 0.1 * energy.mean()


def energies_of_a_mean(o: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
    place, energy = o
    (force,) = torch.autograd.grad(energy.mean(), place, create_graph=True)
    return nf.mse_loss(force, t)


class Energy(nn.Module):
    """Returns a place and an energy that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        place = self.layer(x)
        return place, torch.sin(place).pow(2).sum(-1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_loss_that_takes_gradients_of_its_outputs_is_compared(schedule: str) -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(*list(body())[:2], Energy().double())

    x, target = (torch.randn(ROWS, width, generator=chance(0, width), dtype=torch.float64) for width in (5, WIDTH))
    torch.manual_seed(1)
    plain = model()
    mine = copy.deepcopy(plain)
    pipe = Pipeline(mine, loss_fn=energies, num_microbatches=4, schedule=schedule, num_ranks=2, device="cpu")
    loss = pipe.step(x, target=target).loss
    wanted = energies(plain(x), target)
    torch.autograd.backward(wanted)
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-9, atol=1e-12)
    for param, two in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad, two.grad, rtol=1e-8, atol=1e-11)
    pipe = Pipeline(mine, loss_fn=energies_of_a_mean, num_microbatches=4, num_ranks=2, device="cpu")
    with refused(DrumlineError, "of the full batch"):  # a gradient that shrinks as rows are added
        pipe.step(x, target=target)


def test_a_loss_that_picks_alike_in_all_rows_is_compared_on_others() -> None:
    output = torch.randn(6, WIDTH, dtype=torch.float64, generator=chance(0))
    output[:, 0] += 9.0  # the largest of every row, as in models that were not trained yet
    with refused(ModelError, "of the full batch"):
        Comparing(UNFAIR["experts over the batch"][0], torch.device("cpu")).rules(output, torch.zeros_like(output), 6)
