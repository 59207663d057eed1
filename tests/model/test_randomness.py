"""Random numbers, buffers and copies of parameters: what depends on a seed, and what is put back."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.placement import Placement
from drumline.model import pythons_words
from drumline.model.block import Block
from drumline.model.numpys_words import _words_of, numpys_words
from drumline.model.pythons_words import put_pythons_state, pythons_state
from drumline.model.randomness import HostChance, Randomness
from drumline.model.weights.tied import TiedCopies, Ties
from drumline.pipeline.pipeline import Pipeline
from drumline.runtime.recomputing import Buffers

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")


def test_every_part_of_a_seed_counts() -> None:
    def seed(*, seed: int = 0, step: int = 0, microbatch: int = 0, first: int = 0, block: str = "a") -> int:
        randomness = Randomness(seed, CPU, first=first)
        randomness.step = step
        return randomness.seed_for(microbatch, block)

    seeds = [seed(), seed(seed=1), seed(step=1), seed(microbatch=1), seed(first=4), seed(block="b")]
    assert len(set(seeds)) == len(seeds)
    # The second line of a mesh draws as one process does for the same microbatch of the whole batch.
    assert seed(first=4, microbatch=1) == seed(microbatch=5)


def test_dropout_drops_other_places_in_every_step() -> None:
    torch.manual_seed(0)
    pipe = Pipeline(
        nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)),
        loss_fn=functional.mse_loss,
        num_microbatches=2,
        num_ranks=1,
    )
    batch, target = torch.randn(8, 6), torch.randn(8, 6)
    assert len({float(pipe.step(batch, target=target).loss) for _ in range(4)}) == 4  # type: ignore[arg-type]


class Counts(nn.Module):
    """Counts its calls; nobody can know that it draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made: Tensor = self.layer(x)
        return made


def test_a_block_that_draws_nothing_runs_once_also_beside_one_that_is_seeded() -> None:
    counts = Counts()
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), counts, nn.Linear(6, 6))
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, num_ranks=1, checkpoint=["0", "1"])
    batch = torch.randn(8, 6)
    for step in range(1, 4):
        pipe.step(batch, target=batch)
        assert counts.calls == 4 * step


def test_statistics_are_saved_though_the_first_forward_left_them_alone() -> None:
    buffers = Buffers([nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))])
    for _ in range(2):
        assert len(buffers.save()) == 3
        buffers.learn()


def test_a_copy_is_frozen_and_freed_with_what_it_follows() -> None:
    first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    last.weight = first.weight
    cuts = [[Block("0", first)], [Block("1", last)]]
    copies = TiedCopies(1, Ties(cuts, Placement.linear(2)), cuts)
    (made,) = copies.of(1, cuts[1])
    assert isinstance(made.module, nn.Linear)
    for trains in (False, True, False):
        first.weight.requires_grad_(trains)
        copies.follow()
        assert made.module.weight.requires_grad is trains


def test_the_second_of_two_normal_numbers_is_noticed() -> None:
    np.random.seed(0)
    np.random.randn()  # leaves the second in store
    before = HostChance()
    drawn = np.random.randn()
    assert numpys_words() == before._words  # nothing else has moved
    assert before.has_moved()
    with before.again():
        assert np.random.randn() == drawn


def test_a_state_taken_since_another_is_the_same_as_one_taken_alone() -> None:
    np.random.seed(0)
    first = HostChance()
    assert HostChance(since=first)._numpy is first._numpy
    np.random.randn()
    second = HostChance(since=first)
    assert first.differs_from(second)
    assert not second.differs_from(HostChance())


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("num_between", [0, 1, 2])
def test_a_state_is_restored_with_the_number_that_was_in_store(num_before: int, num_between: int) -> None:
    np.random.seed(0)
    np.random.randn(num_before)
    before, wanted = HostChance(), [*np.random.RandomState(0).randn(6)[num_before:]]
    np.random.seed(1)
    np.random.randn(num_between)
    before.restore()
    assert [*np.random.randn(6 - num_before)] == wanted


@pytest.mark.parametrize("knows", [True, False])
def test_pythons_state_is_put_back_also_where_its_words_are_not_known(
    knows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(0)
    random.gauss()  # leaves a second number in store
    before, wanted = pythons_state(), random.Random(0)
    wanted.gauss()
    assert isinstance(before[0], bytes)
    random.seed(1)
    if not knows:
        monkeypatch.setattr(pythons_words, "_words", lambda: None)
        put_pythons_state(random.getstate())
    put_pythons_state(before)
    assert [random.gauss(), random.random()] == [wanted.gauss(), wanted.random()]
    assert random.getstate() == wanted.getstate()


def test_words_of_another_generator_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.random, "get_state", lambda: ("MT19937", [0] * 624, 0, 0, 0.0))
    _words_of.cache_clear()
    try:
        assert numpys_words() is None
        before = HostChance()
        random.random()
        assert before.has_moved()
    finally:
        _words_of.cache_clear()
