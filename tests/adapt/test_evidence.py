"""Evidence for a change: written-out series of gains, and noise that must convince nobody."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from drumline.adapt.evidence import SURE_OF_HOME, noise_of, spells, weighed
from some import some

OFTEN: dict[str, Any] = {"pause": 0.05, "patience": 3, "within": 100}


def pays(*parts: tuple[float, int], **settings: Any) -> list[bool]:
    """Return after each step of the last part whether a change pays; parts are a gain and how many steps it lasts."""
    series = np.array([gain for gain, count in parts for _ in range(count)])
    count = parts[-1][1]
    verdicts = [weighed(series[: len(series) - left], **{**OFTEN, **settings}) for left in reversed(range(count))]
    return [verdict is not None and verdict.pays for verdict in verdicts]


@pytest.mark.parametrize("sigma", [0.02, 0.1, 0.4])
def test_noise_is_found_beside_jumps(sigma: float) -> None:
    dice = np.random.default_rng(7)
    levels = np.repeat([0.0, 1.0, -0.5, 2.0], 32)
    assert float(noise_of(levels + sigma * dice.standard_normal(128))) == pytest.approx(sigma, rel=0.3)


def test_a_change_pays_from_the_third_step_on() -> None:
    assert pays((-0.06, 20), (0.2, 5)) == [False, False, True, True, True]


def test_single_steps_are_no_sign_however_large() -> None:
    assert not any(pays((-0.06, 20), (5.0, 1), (-0.06, 4)))
    assert not any(pays((-0.06, 20), (5.0, 1), (-0.06, 1), (5.0, 1), (-0.06, 3)))


def test_longer_pauses_ask_for_more_steps() -> None:
    """There and back are 2 steps, of which each step saves 0.2, within 4 times the least noise."""
    told = pays((-0.06, 120), (0.2, 14), pause=1.0)
    assert told.index(True) == 10
    assert all(some(told[10:]))


def test_the_way_home_needs_less_evidence_than_another_move() -> None:
    """With jagged gains of 0.2 on average, 4 standard errors are less than the sum after about twice the steps of 3."""
    before, jagged = [(-0.3, 1), (-0.1, 1)] * 10, [(0.3, 1), (0.1, 1)] * 16
    told, home = (
        [pays(*before, *jagged[:count], **more)[-1] for count in range(1, 33)] for more in ({}, {"sure": SURE_OF_HOME})
    )
    assert 3 < home.index(True) < 0.7 * told.index(True)
    assert all(some(home[told.index(True) :]))


def test_spells_that_end_as_soon_as_they_are_noticed_are_left_alone() -> None:
    once = [(-0.2, 4), (0.2, 4)]
    assert pays((-0.2, 40), (0.2, 4)) == [False, False, True, True], "nothing is known of the first one"
    assert not any(pays((-0.2, 40), *once[1:], *once, *once))


def test_long_spells_pay_every_time_once_they_are_known() -> None:
    once = [(-0.2, 20), (0.2, 20)]
    assert pays((-0.2, 20), (0.2, 20), *once)[2]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_a_spell_that_outlasts_all_others_counts_for_itself(count: int) -> None:
    """However often it did not pay before: the way is never blocked for good."""
    told = pays((-0.2, 20), *[(0.2, 4), (-0.2, 4)] * count, (0.2, 20))
    assert told.index(True) <= 8


def test_ups_and_downs_that_pay_in_the_long_run_are_taken() -> None:
    series = [(-0.1, 4), (0.5, 4)] * 6
    assert any(pays((-0.1, 20), *series))


@pytest.mark.parametrize("sigma", [0.02, 0.05, 0.1, 0.2, 0.4])
def test_noise_convinces_nobody(sigma: float) -> None:
    for seed in some(range(4)):
        gains = -0.03 + sigma * np.random.default_rng(seed).standard_normal(400)
        each = (weighed(gains[max(end - 128, 0) : end], **OFTEN) for end in range(3, 400))
        assert not any(verdict is not None and verdict.pays for verdict in each)


def test_the_sum_of_gains_is_cut_where_it_turns() -> None:
    """Ups and downs of at most 1 do not count: the sum goes to -3, over a dip of 1 to 4, and down again."""
    gains = np.array([-1.0, -2, 3, 1, -1, 4, -2, -1, -1])
    found = spells(gains, 1.0)
    assert [(spell.start, spell.end, spell.gain) for spell in found] == [(0, 2, -3.0), (2, 6, 7.0), (6, 9, -4.0)]
