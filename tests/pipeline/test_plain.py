"""The unsplit model by itself: it seeds blocks as a pipeline does, and only those that draw."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drumline.engine.unsplit.plain import Plain
from drumline.model.randomness import Randomness

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("last", "draws"), [(nn.ReLU(), False), (nn.Dropout(0.5), True)])
def test_generators_that_other_threads_use_are_left_alone_unless_a_block_draws(last: nn.Module, draws: bool) -> None:
    plain = Plain(nn.Sequential(nn.Linear(2, 2), last), ["0", "1"])
    with plain.seeding(0, Randomness(0, torch.device("cpu"))) as run:
        before = torch.get_rng_state()
        run(torch.ones(1, 2))
        assert torch.equal(torch.get_rng_state(), before) != draws
