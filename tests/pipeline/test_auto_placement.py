"""`schedule="auto"` with an example: the set-up chooses how many stages a rank holds, by what blocks take."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.engine.stages.balance import Balance
from drumline.pipeline import placing
from drumline.pipeline.cutting import time_blocks
from drumline.pipeline.pipeline import Pipeline
from drumline.plan.device.blocks import OpTimes
from drumline.schedules import generate
from torch_models import Reference

pytestmark = [pytest.mark.torch, pytest.mark.features("adapt")]

WIDTH = 8
PLAIN = OpTimes(1e-3, 2e-3, 1e-3, 1e-3)
SPARSE = OpTimes(3e-3, 6e-3, 3e-3, 6e-3)
X = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0))


def chain(blocks: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks)))


def pipeline(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *, times: list[OpTimes], **more: Any) -> Pipeline:
    """Return a pipeline whose blocks were found to take these times."""
    timed = time_blocks

    def told(*given: Any) -> Balance | None:
        balance = timed(*given)
        assert balance is not None
        layers = (replace(layer, times=each) for layer, each in zip(balance.profile.layers, times, strict=True))
        profile = replace(balance.profile, layers=tuple(layers), overhead=OpTimes(0.0, 0.0, 0.0, 0.0))
        return replace(balance, profile=profile)

    monkeypatch.setattr(placing, "time_blocks", told)
    settings: dict[str, Any] = {"example": X, "example_target": X, "num_microbatches": 8, "num_ranks": 2}
    return Pipeline(model, loss_fn=functional.mse_loss, schedule="auto", transport="in-process", **settings | more)


def test_uneven_blocks_get_several_stages_per_rank_with_exact_gradients(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chain()
    expected = copy.deepcopy(model)
    pipe = pipeline(monkeypatch, model, times=[PLAIN] * 8 + [SPARSE] * 4)
    assert pipe.program.num_stages > 2
    assert pipe.balance is not None
    counts = list(pipe.balance.counts)
    assert list(map(len, pipe.blocks)) == counts
    said = capsys.readouterr().err
    assert f"schedule: begins with {pipe.program.name}, {pipe.program.num_stages // 2} stages per rank of" in said
    assert f"balance={counts}, measured on cpu" in said
    reference = Reference(expected, pipe.program, functional.mse_loss, balance=counts)
    result = pipe.step(X, target=X)
    assert result.loss is not None
    assert torch.equal(result.loss, reference.step(X, X))
    reference.compare(pipe, exact=True)


@pytest.mark.parametrize(
    "more", [{"stages_per_rank": 1}, {"balance": [6, 6]}, {"checkpoint": "full"}, {"example": None}], ids=str
)
def test_what_the_user_decides_stays(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    pipe = pipeline(monkeypatch, chain(), times=[PLAIN] * 8 + [SPARSE] * 4, **more)
    assert pipe.program == generate("zb-h1", num_ranks=2, num_microbatches=8)


def test_frozen_layers_keep_one_stage_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    model = chain()
    model[0].requires_grad_(False)
    pipe = pipeline(monkeypatch, model, times=[PLAIN] * 12)
    assert pipe.program.num_stages == 2


def test_one_stage_per_rank_stays_where_more_gain_less_than_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    heavy = [OpTimes(1e-6, 2e-6, 1e-6, 1e-6)] * 11 + [SPARSE]
    pipe = pipeline(monkeypatch, chain(), times=heavy)
    assert pipe.program == generate("zb-h1", num_ranks=2, num_microbatches=8)
    assert pipe.balance is not None
    assert list(map(len, pipe.blocks)) == list(pipe.balance.counts)
