"""What recomputed blocks find again is said once, and `pipe.kept_state` has it."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from state_case_table import last
from state_kinds import WIDTH, Counter, Keeps, LateList, OwnGenerator, PythonChance
from state_models import InAGlobal, begin_anew, layers
from state_pipes import piped

pytestmark = pytest.mark.torch


def step(pipe: dl.Pipeline) -> None:
    x: Tensor = torch.ones(8, WIDTH)
    pipe.step(x, target=x)


class Both(Keeps):
    def begin(self) -> None:
        self.calls, self.chance = 0, torch.Generator()

    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        return torch.rand(1, generator=self.chance)


def test_what_is_put_back_is_said_once_by_block_and_name(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = piped(nn.Sequential(Both(), *list(layers())[:2], Counter()), checkpoint="full")
    for _ in range(3):
        step(pipe)
    lines = [line for line in capsys.readouterr().err.splitlines() if "recomputed" in line]
    assert lines == [
        "drumline: recomputed, block '0' finds calls, chance again",
        "drumline: recomputed, block '3' finds calls again",
    ]
    assert pipe.kept_state == {"0": ["calls", "chance"], "3": ["calls"]}


def test_variables_outside_are_said_too(capsys: pytest.CaptureFixture[str]) -> None:
    begin_anew()
    pipe = piped(last(InAGlobal)(), checkpoint="full")
    step(pipe)
    assert pipe.kept_state == {"3": ["global 'STATE'"]}
    assert "block '3' finds global 'STATE' again" in capsys.readouterr().err


def test_what_begins_later_is_said_then(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = piped(nn.Sequential(*(LateList() for _ in range(2))), checkpoint="full")
    step(pipe)
    assert "means" not in capsys.readouterr().err
    for _ in range(3):
        step(pipe)
    assert "means" in capsys.readouterr().err
    assert pipe.kept_state == {"0": ["calls", "means"], "1": ["calls", "means"]}


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_blocks_that_keep_nothing_say_nothing(capsys: pytest.CaptureFixture[str], checkpoint: str) -> None:
    pipe = piped(layers(), checkpoint=checkpoint)
    step(pipe)
    assert "recomputed" not in capsys.readouterr().err
    assert pipe.kept_state == {}


def test_without_recomputation_the_first_forward_shows_what_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    pipe = piped(nn.Sequential(OwnGenerator(), PythonChance()))
    step(pipe)
    assert pipe.kept_state == {"0": ["chance"], "1": ["chance"]}
    assert "recomputed" not in capsys.readouterr().err


class Noisy(nn.Module):
    """Draws from NumPy: an even number, or one of a pair of normal numbers, of which the second is kept in store."""

    draws_pairs = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        number = np.random.randn() if type(self).draws_pairs else np.random.rand()
        made: Tensor = self.linear(x) * float(number)
        return made.tanh()


def test_a_number_in_store_that_the_user_has_put_there_between_two_steps_is_found_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Noisy()
    pipe = piped(nn.Sequential(block), checkpoint="full", num_ranks=1, num_microbatches=1)
    step(pipe)
    pipe.zero_grad()
    kind, words, place, *_ = cast(tuple[Any, ...], np.random.get_state())
    monkeypatch.setattr(Noisy, "draws_pairs", True)
    np.random.set_state((kind, words, place, 1, 0.5))
    step(pipe)
    found = block.linear.weight.grad
    assert found is not None
    found = found.clone()
    block.zero_grad()
    np.random.set_state((kind, words, place, 1, 0.5))
    x = torch.ones(8, WIDTH)
    torch.autograd.backward(nn.functional.mse_loss(block(x), x))
    torch.testing.assert_close(found, block.linear.weight.grad, rtol=0, atol=1e-7)
