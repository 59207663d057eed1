"""How much of a difference is rounding: nudged runs of the model by itself, of which the farthest counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from drumline.engine.unsplit.unsplit_step import Made
from drumline.features.check.by_itself.rounding import DRAWS, Nudge, Rounding
from drumline.features.check.by_itself.wanted import PlainResult

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]

WEIGHT = nn.Parameter(torch.ones(2))


def made(gradient: float, *, loss: float = 1.0, output: float = 1.0) -> PlainResult:
    """Return what a run of a model made."""
    gradients = {WEIGHT: torch.full((2,), gradient)}
    return PlainResult(Made(torch.tensor([output]), torch.tensor(loss), 1.0), gradients, {})


def product(seed: int | None) -> Tensor:
    """Return a product in bfloat16, nudged or as it is."""
    torch.manual_seed(0)
    left, right = (torch.randn(8, 8).bfloat16() for _ in range(2))
    if seed is None:
        return left @ right
    with Nudge(seed):
        return left @ right


def test_the_run_that_is_farthest_off_counts() -> None:
    runs = [made(3.0), made(5.0, loss=1.5), None, made(2.5, output=3.0)]
    found = Rounding.between(made(2.0), runs)
    assert found.gradients[WEIGHT] == pytest.approx(3.0 * 2**0.5)
    assert found.loss == pytest.approx(0.5)
    assert found.output == pytest.approx(2.0)


def test_nothing_is_known_without_runs() -> None:
    assert Rounding.between(made(2.0), [None, None]) == Rounding.between(None, [made(2.0)]) == Rounding()


def test_every_run_is_nudged_in_its_own_way_and_again_alike() -> None:
    plain, runs = product(None), [product(seed) for seed in range(DRAWS)]
    assert len({tuple(run.flatten().tolist()) for run in (plain, *runs)}) == DRAWS + 1 > 2
    assert torch.equal(product(1), runs[1])
    for run in runs:
        assert ((run - plain).abs() <= 2 * torch.finfo(torch.bfloat16).eps * plain.abs()).all()
