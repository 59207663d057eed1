"""The number of microbatches in noise: it is compared by as many steps as the noise asks for, and rarely changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from drumline.adapt.decide import Decider
from drumline.adapt.proposal import NUMBER
from drumline.adapt.tries import Tries
from some import some
from virtual_pipeline import Virtual, one_f_one_b, settings

pytestmark = pytest.mark.slow

_NUM_STEPS = 160
_ALONE = settings(microbatches="batch", rebalance="keep", program=False, max_activations=16)


def _run(slowness: Callable[[int], list[float]], fixed: Callable[[int], float], num_steps: int = _NUM_STEPS) -> Virtual:
    run = Virtual(one_f_one_b(8), (8, 8), slowness, settings=_ALONE, build=one_f_one_b, fixed=fixed, rows=64)
    return run.run(num_steps)


def _static(number: int, slowness: Callable[[int], list[float]], fixed: Callable[[int], float]) -> float:
    """Return what all steps take with a number that never changes."""
    share = 8 / number
    slow = Virtual(one_f_one_b(number), (8, 8), lambda step: [share * each for each in slowness(step)], fixed=fixed)
    slow.settings = settings(rebalance="keep", program=False)
    return sum(step.makespan for step in some(slow.run(_NUM_STEPS).steps))


@pytest.mark.parametrize(("sigma", "seed"), [(0.1, 1), (0.1, 3), (0.3, 0), (0.4, 2)])
def test_in_noise_no_number_is_taken_by_chance(sigma: float, seed: int) -> None:
    """Actions have a fixed cost of 2 ms: 4 and 8 microbatches take about the same, all others 8% longer or more."""
    noise = np.exp(sigma * np.random.default_rng(seed).standard_normal((_NUM_STEPS, 2)))

    def slowness(step: int) -> list[float]:
        return [float(each) for each in noise[step]]

    run = _run(slowness, lambda step: 2e-3)
    assert len(run.proposals) <= 8
    taken = sum(step.makespan for step in some(run.steps))
    assert taken <= 1.03 * min(_static(number, slowness, lambda step: 2e-3) for number in (4, 8))


def test_a_number_that_loses_is_left_however_noisy_its_steps_are() -> None:
    """With more than 16 microbatches, every second step takes three times as long, which costs of 8 cannot tell."""
    run = Virtual(one_f_one_b(8), (8, 8), settings=_ALONE, build=one_f_one_b, rows=64, fixed=lambda step: 1e-4)

    def slowness(step: int) -> list[float]:
        is_slow = run.num_microbatches > 16 and step % 2 == 0
        return [3.0 if is_slow else 1.0] * 2

    run.slowness = slowness
    run.run(60)
    assert any(proposal.after.program.num_microbatches > 16 for proposal in run.proposals)
    assert any(proposal.is_back for proposal in run.proposals)
    assert run.steps[-1].program.num_microbatches <= 16


def test_first_noisy_steps_do_not_keep_a_number_that_loses() -> None:
    """With more than 16 microbatches, two of the first three steps that count are quick, and then all are slow."""
    run = Virtual(one_f_one_b(8), (8, 8), settings=_ALONE, build=one_f_one_b, rows=64, fixed=lambda step: 1e-4)

    def slowness(step: int) -> list[float]:
        since = 0
        while since < step and run.steps[step - since - 1].program.num_microbatches > 16:
            since += 1
        return [(0.6 if since in (1, 3) else 1.6) if run.num_microbatches > 16 else 1.0] * 2

    run.slowness = slowness
    run.run(24)
    assert [proposal.is_back for proposal in run.proposals] == [False, False, True]
    assert run.steps[-1].program.num_microbatches <= 16


def test_a_trial_that_loses_ends_where_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight rows, so eight microbatches are best; and all numbers count as taken back often."""
    monkeypatch.setattr(Decider, "_admits", lambda *_, **__: False)
    run = Virtual(one_f_one_b(8), (8, 8), settings=_ALONE, build=one_f_one_b, rows=8, fixed=lambda step: 1e-5).run(20)
    assert [proposal.after.program.num_microbatches for proposal in run.proposals] == [4, 8]


def test_numbers_come_back_ever_more_rarely_until_something_lastingly_changes() -> None:
    tries = Tries(8, first=8)
    tries.settled(4, step=10)
    assert tries.are_due(11)
    for step, until in ((20, 52), (60, 188), (200, 712), (800, 2848), (3000, 5048)):
        tries.settled(8, step=step)
        assert [tries.are_due(at) for at in (until - 1, until)] == [False, True]
    tries.see([1.0] * 9)
    tries.see([1.2] * 9)
    tries.see([5.0] * 8)
    assert not tries.are_due(3001)
    tries.see([0.79] * 9)
    assert tries.are_due(3001)
    tries.settled(4, step=3010)
    assert tries.are_due(3011), "it was left before the change"


def test_a_lasting_change_is_followed_at_once_after_a_number_came_back() -> None:
    """Fixed costs of 2 ms, where 4 and 8 are tried and one comes back; then of 20 ms, where 1 or 2 are best."""
    run = _run(lambda step: [1.0, 1.0], lambda step: 2e-3 if step < 30 else 20e-3, 70)
    late = [proposal for proposal in run.proposals if proposal.step >= 30]
    assert {proposal.kind for proposal in late} == {NUMBER}
    assert late[0].step < 40
    assert run.steps[-1].program.num_microbatches <= 2


def test_noisy_steps_are_waited_for() -> None:
    """A number that is tried runs for one step, and for more in noise, unless its gain is large."""

    def num_tried(noise: float, fixed: float) -> int:
        factors = np.exp(noise * np.random.default_rng(5).standard_normal((_NUM_STEPS, 2)))
        first, second, *_ = _run(lambda step: [float(each) for each in factors[step]], lambda step: fixed, 60).proposals
        assert first.is_trial
        assert first.step <= 10
        return second.step - first.step

    assert num_tried(0.0, 1e-4) == 2
    assert num_tried(0.1, 2e-3) >= 9
    assert num_tried(0.1, 50e-3) == 2, "few microbatches take half as long"
