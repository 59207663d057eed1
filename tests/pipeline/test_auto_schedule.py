"""`schedule="auto"`: all ranks change the program together, and gradients stay exact."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import UsageError
from drumline.pipeline.pipeline import Pipeline
from matrices import mainly
from refused import refused
from torch_models import Reference

pytestmark = [pytest.mark.torch, pytest.mark.features("adapt")]

WIDTH = 8


def uneven(blocks: int = 8) -> nn.Sequential:
    """Return a chain whose last block is several times as heavy as the others."""
    torch.manual_seed(0)
    light = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(blocks - 1)]
    heavy = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)))
    return nn.Sequential(*light, heavy)


def batch(step: int, rows: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=random), torch.randn(rows, WIDTH, generator=random)


@mainly(("ranks", "stages_per_rank"), (2, 2), (2, 1), (4, 1))
def test_gradients_are_exact_before_and_after_the_program_changes(
    ranks: int, stages_per_rank: int, capsys: pytest.CaptureFixture[str]
) -> None:
    model = uneven()
    expected = copy.deepcopy(model)
    pipe = Pipeline(
        model,
        loss_fn=functional.mse_loss,
        schedule="auto",
        num_microbatches=8,
        num_ranks=ranks,
        stages_per_rank=stages_per_rank,
        balance="even",
    )
    first = pipe.program
    for step in range(24):
        x, y = batch(step)
        reference = Reference(expected, pipe.program, functional.mse_loss, balance="even")
        result = pipe.step(x, target=y)
        if pipe.program is not reference.program:  # it changed at the start of this step
            reference = Reference(expected, pipe.program, functional.mse_loss, balance="even")
        wanted = reference.step(x, y)
        assert result.loss is not None
        assert torch.equal(result.loss, wanted)
        reference.compare(pipe, exact=True)
        pipe.zero_grad()
        reference.model.zero_grad()
        expected = reference.model
    found = pipe.searched
    assert found is not None
    assert found.predicted <= found.predicted_before * (1 + 1e-9)
    assert found.bound <= found.predicted * (1 + 1e-9)
    said = capsys.readouterr().err
    if found.predicted_gain < 0.01:
        assert "schedule: kept " in said
        assert found.gained is None
    else:
        assert found.gained is not None
        assert "a measured step takes" in said
        assert found.is_kept is (found.gained > 0)
    assert max(dl.simulate(pipe.program).peak_activations) <= max(dl.simulate(first).peak_activations)


def trained(num_steps: int) -> tuple[str, list[float]]:
    pipe = Pipeline(uneven(), loss_fn=functional.mse_loss, schedule="auto", num_microbatches=8, balance="even")
    losses = []
    for step in range(num_steps):
        x, y = batch(step)
        result = pipe.step(x, target=y)
        assert result.loss is not None
        losses.append(result.loss.item())
        pipe.zero_grad()
    return pipe.program.format(), losses


def test_ranks_of_their_own_change_the_program_together() -> None:
    (first, losses), (second, others) = dl.launch(trained, 17, num_ranks=2)
    assert first == second
    assert losses == others


@pytest.mark.features("record")
def test_what_does_not_go_with_it_is_refused() -> None:
    with refused(UsageError, "record is False, and schedule is 'auto'"):
        Pipeline(uneven(), loss_fn=functional.mse_loss, schedule="auto", num_microbatches=2, num_ranks=2, record=False)
