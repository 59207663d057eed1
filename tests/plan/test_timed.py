"""Cuts timed by the simulator: the shortest step of all cuts, also with frozen blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import FLUSHED, cuts, stage_seconds
from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.partition import partition
from drumline.plan.cut.peaks import held_by
from drumline.plan.cut.timed import TimedCuts, steps_of
from matrices import examples
from programs import build, programs
from refused import refused


def timed(chain: list[BlockCosts], program: Program) -> TimedCuts:
    """Return the cuts of a chain whose backward takes twice its forward, half of it for I."""

    return TimedCuts(chain, program, steps_of(lambda counts: costs_of(chain, counts)))


def costs_of(chain: list[BlockCosts], counts: tuple[int, ...]) -> Costs:
    third = [duration / 3 for duration in stage_seconds(chain, counts)]
    return Costs(forward=third, backward_input=third, backward_weight=third)


def makespans(found: TimedCuts, many: list[tuple[int, ...]]) -> list[float]:
    return [cut.seconds for cut in found.timed(many)]


def chain_of(*seconds: float, size: float = 0.0) -> list[BlockCosts]:
    return [BlockCosts(duration, static_bytes=size) for duration in seconds]


@settings(deadline=None, max_examples=examples(40))
@given(programs(FLUSHED, max_ranks=3, max_microbatches=5), st.data())
def test_a_step_is_no_longer_than_with_the_evenest_ranks(program: Program, data: st.DataObject) -> None:
    seconds = st.integers(1, 20)
    chain = chain_of(*data.draw(st.lists(seconds, min_size=program.num_stages, max_size=program.num_stages + 4)))
    found = timed(chain, program)
    best = found.best()
    even = partition(chain, program.num_stages, held_pairs=held_by(program)).counts
    assert sum(best.counts) == len(chain)
    assert best.seconds == stage_seconds(chain, best.counts)
    taken, before = makespans(found, [best.counts, even])
    assert taken <= before
    assert taken == pytest.approx(simulate(program, costs_of(chain, best.counts)).makespan)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "zb-h1", "dualpipe", "hanayo"])
def test_the_step_is_the_shortest_of_all_cuts(name: str) -> None:
    program = build(name, 2, 8)
    found = timed(chain_of(2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 4), program)
    every = list(cuts(11, program.num_stages))
    assert makespans(found, [found.best().counts]) == pytest.approx([min(makespans(found, every))], rel=2e-3)


def test_what_is_frozen_is_timed_without_its_backward_and_held_less() -> None:
    program = build("1f1b", 2, 4)
    trains = [False] * 6 + [True] * 2

    def costs(counts: tuple[int, ...]) -> Costs:
        first = counts[0]
        frozen = [min(first, 6), max(6 - first, 0)]
        return Costs(
            forward=list(counts), backward=[2.0 * (count - still) for count, still in zip(counts, frozen, strict=True)]
        )

    chain = [BlockCosts(3.0 if trained else 1.0, trains=trained) for trained in trains]
    found = TimedCuts(chain, program, steps_of(costs))
    assert found.best().counts == (6, 2)
    assert not any(action.op.value == "B" and action.stage == 0 for action in found.pruned((6, 2)).work())


def test_a_limit_holds_for_what_frozen_stages_really_hold() -> None:
    program = build("gpipe", 2, 4)
    whole = BlockCosts(1.0, activation_bytes=10.0)
    found = timed([replace(whole, trains=False)] * 3 + [whole], program).best(max_bytes=40)
    assert (found.counts, found.rank_bytes) == ((3, 1), (30, 40))  # without a backward one microbatch is held at a time
    with refused(PlanError, "within 40 bytes", expected="max_bytes=80 or more"):
        timed([whole] * 4, program).best(max_bytes=40)
