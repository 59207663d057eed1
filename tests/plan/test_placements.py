"""Schedules and stages per rank for blocks of which a third hold experts, against all cuts one by one."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import makespans
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.plan.device.placements import arrangements, chosen
from drumline.plan.device.ranks import Ranks

NAMES = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "interleaved-zb", "hanayo")
OPS = ("forward", "backward", "backward_input", "backward_weight")
NOTHING = OpTimes(0.0, 0.0, 0.0, 0.0)
PLAIN = OpTimes(0.7, 1.25, 0.6, 0.7)
SPARSE = OpTimes(2.7, 6.0, 2.4, 8.0)  # split, its backward takes much longer than whole
CHEAP = OpTimes(2.7, 6.0, 3.0, 3.0)


def profile(sparse: OpTimes, *, activation: int = 0) -> Profile:
    each = [PLAIN] * 16 + [sparse] * 8
    blocks = (ProfiledBlock(str(at), times, activation, 0, 0, 8, 8, 0) for at, times in enumerate(each))
    return Profile(tuple(blocks), NOTHING, "cpu", 1)


@cache
def cuts(stages: int) -> list[tuple[int, ...]]:
    return [tuple(b - a for a, b in pairwise((0, *ends, 24))) for ends in combinations(range(1, 24), stages - 1)]


def shortest(program: Program, known: Profile) -> float:
    """Return the shortest step of all cuts, simulated one by one from sums over blocks."""

    def costs(cut: tuple[int, ...]) -> Costs:
        spans = list(pairwise(accumulate(cut, initial=0)))
        sums: dict[str, Any] = {
            op: [sum(getattr(b.times, op) for b in known.layers[i:j]) for i, j in spans] for op in OPS
        }
        return Costs(**sums)

    return float(min(makespans(program, [costs(cut) for cut in cuts(program.num_stages)])))


@pytest.mark.parametrize("sparse", [SPARSE, CHEAP], ids=["split-is-dear", "split-is-free"])
def test_every_arrangement_has_the_shortest_of_all_cuts_and_the_best_comes_first(sparse: OpTimes) -> None:
    known = profile(sparse)
    found = [each for each in arrangements(known, Ranks.of(2), 8, names=NAMES) if each.program.num_stages <= 4]
    programs = [each.program for each in found]
    assert {(each.name, each.num_stages // 2) for each in programs} == {
        ("1f1b", 1), ("zb-h1", 1), ("interleaved-1f1b", 2), ("zb-v", 2), ("interleaved-zb", 2), ("hanayo", 2),
    }  # fmt: skip
    brute = [shortest(each, known) for each in programs]
    assert [each.step_seconds for each in found] == pytest.approx(brute)
    assert brute == sorted(brute)
    names = [each.name for each in programs]
    assert (names.index("zb-v") < names.index("1f1b")) is (sparse is CHEAP), "what halves take decides"


def test_one_that_holds_too_much_is_not_chosen_and_equal_ones_have_the_fewest_stages() -> None:
    found = arrangements(profile(SPARSE, activation=100), Ranks.of(2), 8, names=(*NAMES, "looped-bfs"))
    free = chosen(found, float("inf"))
    assert free is not None
    assert free.step_seconds <= 1.01 * found[0].step_seconds
    assert not [
        each
        for each in found
        if each.step_seconds <= 1.01 * found[0].step_seconds and each.program.num_stages < free.program.num_stages
    ]
    less = chosen(found, free.peak - 1)
    assert less is not None
    assert less.peak < free.peak
    assert chosen(found, 0.0) is None


def test_a_slow_rank_gets_fewer_blocks() -> None:
    even, slow = (
        arrangements(profile(SPARSE), Ranks.of(2, rank_speeds=speeds), 8, names=["1f1b"])[0]
        for speeds in ([1.0, 1.0], [1.0, 0.5])
    )
    assert slow.cut.counts[0] > even.cut.counts[0]
    assert slow.step_seconds > even.step_seconds
