"""Drift of measured seconds: what counts as a change, how soon it is noticed, and what does not count."""

from __future__ import annotations

import random

import pytest

from drumline.adapt.drift import Drift
from some import some


def noisy(level: float, random_: random.Random, spread: float = 0.02) -> float:
    return level * random_.uniform(1 - spread, 1 + spread)


@pytest.mark.parametrize("seed", range(20))
def test_a_steady_series_with_noise_and_single_outliers_never_changes(seed: int) -> None:
    dice = random.Random(seed)
    drift = Drift(threshold=0.1)
    for step in range(300):
        level = 3.0 if step % 17 == 9 else 1.0
        assert drift.see(step, {"F": noisy(level, dice, 0.04)}) == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("level", [0.5, 0.75, 1.3, 1.5, 4.0])
def test_a_sudden_change_is_told_within_six_steps_with_both_levels(seed: int, level: float) -> None:
    dice = random.Random(seed)
    drift = Drift(threshold=0.1)
    told = [drift.see(step, {"F": noisy(1.0 if step < 50 else level, dice)}) for step in range(80)]
    (change, *others), *_ = [row for row in told if row]
    assert not others
    assert 52 <= change.step <= 56
    assert change.since in (49, 50, 51)
    assert change.ratio == pytest.approx(level, rel=0.05)
    assert sum(map(len, told)) == 1, "the new level is the reference from then on"


def test_a_slow_change_is_told_before_it_reaches_fifteen_percent() -> None:
    drift = Drift(threshold=0.1)
    told = [drift.see(step, {"F": 1.0 + 0.01 * max(step - 10, 0)}) for step in range(26)]
    assert [change.name for row in told for change in row] == ["F"]


def test_a_planned_level_counts_from_the_first_step() -> None:
    drift = Drift(threshold=0.1)
    drift.begin({"F": 1.0, "link": 1.0})
    told = [drift.see(step, {"F": 1.4, "link": 1.01}) for step in range(3)]
    assert [[change.name for change in row] for row in told] == [[], [], ["F"]]


@pytest.mark.parametrize(
    ("first", "level", "steps"),
    [
        # A tenth is the threshold: each step adds ln(1.12) - ln(1.1) / 2 = 0.066, and 3.2 ln(1.1) = 0.305 is needed.
        ([1.0] * 5, 1.12, 5),
        ([1.0] * 5, 1 / 1.12, 5),
        # Half of the steps of the reference are off by 6%: only what exceeds 1.5 times that adds up, 0.223 - 0.087 a
        # step, until it is 6 times as much, 0.524.
        ([1.0, 1.06, 1 / 1.06, 1.06, 1 / 1.06], 1.25, 4),
        # However far, a step adds two fifths of what is needed.
        ([1.0] * 5, 100.0, 3),
    ],
)
def test_what_adds_up_is_told_at_the_step_that_a_hand_computes(first: list[float], level: float, steps: int) -> None:
    drift = Drift(threshold=0.1)
    told = [drift.see(step, {"F": value}) for step, value in enumerate([*first, *[level] * steps])]
    assert [len(row) for row in told] == [0] * (4 + steps) + [1]
    assert told[-1][0].since == 5


def test_what_ends_is_told_as_well() -> None:
    drift = Drift(threshold=0.1)
    told = [drift.see(step, {"F": 1.5 if 20 <= step < 40 else 1.0}) for step in range(60)]
    ratios = [change.ratio for row in told for change in row]
    assert ratios == [pytest.approx(1.5), pytest.approx(1 / 1.5)]


def test_values_that_mean_nothing_are_passed_over() -> None:
    drift = Drift(threshold=0.1)
    for step, value in enumerate(some([0.0, float("inf"), float("nan"), -1.0])):
        assert drift.see(step, {"F": value}) == []
