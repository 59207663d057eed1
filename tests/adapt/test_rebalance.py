"""Moves of half a stage, and what a decider hears from outside."""

from __future__ import annotations

from typing import Any

import pytest

from drumline.adapt.decide import Decider
from drumline.adapt.proposal import CUT, Arrangement, Proposal
from drumline.adapt.rebalance import Layers
from drumline.schedules import generate
from virtual_pipeline import Virtual, one_f_one_b, profile, settings


@pytest.mark.parametrize(
    ("counts", "slow", "beside", "expected"),
    [
        ((4, 4, 4), 1, 2, (4, 2, 6)),
        ((4, 4, 4), 1, 0, (6, 2, 4)),
        ((4, 4, 4), 2, 1, (4, 6, 2)),
        ((4, 5, 3), 1, 2, (4, 3, 5)),  # of five, two go
        ((5, 1, 6), 1, 2, None),  # nothing to give
        ((4, 4, 4), 0, 2, None),  # no neighbours
    ],
)
def test_half_of_a_stage_goes_to_the_neighbour(counts: Any, slow: int, beside: int, expected: Any) -> None:
    layers = Layers(profile(12), one_f_one_b(6, num_ranks=3))
    assert layers.half(counts, slow=slow, beside=beside) == expected


def test_of_several_stages_the_first_that_borders_gives() -> None:
    program = generate("interleaved-1f1b", num_ranks=2, num_microbatches=4, stages_per_rank=2)
    layers = Layers(profile(12), program)
    assert layers.half((4, 2, 4, 2), slow=0, beside=1) == (2, 4, 4, 2)
    assert layers.half((4, 2, 4, 2), slow=1, beside=0) == (5, 1, 4, 2)


def test_a_move_costs_the_bytes_of_the_layers_that_change_their_rank() -> None:
    each = 4000 + 2 * 4000  # weights, and two states as large as gradients
    layers = Layers(profile(6), one_f_one_b(6, num_ranks=3))
    assert layers.moved_bytes((2, 2, 2), (2, 2, 2)) == 0
    assert layers.moved_bytes((2, 2, 2), (1, 3, 2)) == each
    assert layers.moved_bytes((2, 2, 2), (3, 2, 1)) == 2 * each
    around = Layers(profile(6), generate("zb-v", num_ranks=2, num_microbatches=4))  # stages on ranks 0, 1, 1, 0
    assert around.moved_bytes((1, 2, 2, 1), (1, 1, 3, 1)) == 0
    assert around.moved_bytes((1, 2, 2, 1), (2, 1, 2, 1)) == each


class Endless:
    """A search that goes on until it is stopped."""

    stopped = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        pass

    def result(self) -> None:
        return None

    def stop(self) -> None:
        self.stopped += 1


def test_a_change_by_hand_ends_the_search() -> None:
    now = Arrangement(one_f_one_b(), (8, 8))
    decider = Decider(settings(), now, layers=Layers(profile(16), now.program), search=Endless)
    search = decider._aside = Endless()
    other = Arrangement(one_f_one_b(), (9, 7))
    decider.changed(other)
    assert decider.now is other
    assert decider._aside is None
    assert search.stopped == 1
    decider.stop()
    assert search.stopped == 1


def test_the_way_home_is_never_blocked() -> None:
    """What was taken back three times has to gain 16%; the cut at the start does not."""
    start, away, farther = (Arrangement(one_f_one_b(), counts) for counts in ((8, 8), (9, 7), (10, 6)))
    decider = Decider(settings(), start, layers=Layers(profile(16), start.program))
    decider._refused = {(CUT, (8, 8)): 3, (CUT, (10, 6)): 3}

    def admitted(after: Arrangement) -> bool:
        return decider._admits(Proposal(50, CUT, "slow", away, after, 1.0, 0.9))

    assert (admitted(start), admitted(farther)) == (True, False)
    decider.changed(farther)
    assert (admitted(start), admitted(farther)) == (False, True), "a cut by hand is the new home"


def test_layers_that_cannot_move_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Virtual(one_f_one_b(), (8, 8), slowness=lambda step: [1.0, 1.5 if step >= 10 else 1.0])
    slow.settings = settings(program=False)
    assert [proposal.after.counts for proposal in slow.run(30).proposals] == [(10, 6)]
    slow.proposals.clear()
    monkeypatch.setattr(Decider, "see", _staying(Decider.see))
    assert slow.run(30).proposals == []


def _staying(see: Any) -> Any:
    def staying(self: Decider, *given: Any) -> Any:
        self.stay()
        return see(self, *given)

    return staying
