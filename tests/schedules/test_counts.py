"""Counts that do not divide: uneven groups, odd ranks, too few microbatches, recipes that do not end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.errors import ScheduleError
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.schedules import generate, schedule, unregister
from names import build
from refused import refused


def forwards_first(name: str, num_ranks: int, num_microbatches: int) -> list[int]:
    """Return how many forwards stand before each rank's first backward."""
    rows = build(name, num_ranks, num_microbatches).rows
    return [next(at for at, action in enumerate(row) if action.op is not Op.FORWARD) for row in rows]


def test_the_warm_up_is_as_long_as_the_first_group_asks_for() -> None:
    # Five microbatches on two ranks are groups of three and two: a round trip is three forwards long.
    assert forwards_first("interleaved-1f1b", 2, 5) == [3 + 2 + 1, 3 + 1]
    assert forwards_first("interleaved-zb", 2, 5) == [3 + 1 + 1, 3 + 1]


@pytest.mark.parametrize("num_microbatches", [1, 2, 3])
@pytest.mark.parametrize("name", ["zb-h1", "zb-h2", "interleaved-zb", "zb-v", "v-half", "v-min", "dualpipe-v"])
def test_every_weight_half_runs_once_with_fewer_microbatches_than_ranks(name: str, num_microbatches: int) -> None:
    program = build(name, 5, num_microbatches)
    assert validate(program) == []
    whole = [part for part in program.work() if part.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)]
    assert len(whole) == len(set(whole)) == program.num_stages * num_microbatches


@pytest.mark.parametrize(
    ("name", "num_ranks", "makespan", "peak"),
    [
        ("v-half", 3, 77, 4),
        ("v-half", 4, 81, 6),
        ("v-half", 5, 83, 6),
        ("v-min", 3, 81, 4),
        ("v-min", 4, 83, 4),
        ("v-min", 5, 87, 6),
    ],
)
def test_blocks_wait_no_longer_than_they_collide(name: str, num_ranks: int, makespan: int, peak: int) -> None:
    timeline = simulate(build(name, num_ranks, 12))
    assert (timeline.makespan, max(timeline.peak_activations)) == (makespan, peak)


def test_two_weight_versions_want_as_many_microbatches_as_ranks() -> None:
    assert build("pipedream-2bw", 4, 4).num_microbatches == 16
    for num_microbatches in (1, 2, 3):
        with refused(ScheduleError, "needs a third weight version"):
            build("pipedream-2bw", 4, num_microbatches)


@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_of_an_odd_number_of_microbatches_more_go_down(num_microbatches: int) -> None:
    for name in ("dualpipe", "chimera"):
        placement = build(name, 2, num_microbatches).placement
        assert placement.homes == (0, 1)
        assert placement.mirrored == frozenset(range((num_microbatches + 1) // 2, num_microbatches))


@pytest.mark.slow
def test_a_recipe_that_yields_empty_rows_for_ever_is_stopped() -> None:
    @schedule("endless")
    def endless(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
        while True:
            yield []

    try:
        with refused(ScheduleError, "the recipe of endless", fix="make sure it ends"):
            generate("endless", num_ranks=1, num_microbatches=1)
    finally:
        unregister("endless")


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 4), (4, 8), (4, 12), (6, 12)])
def test_chimeras_units_follow_each_other_without_a_gap(num_ranks: int, num_microbatches: int) -> None:
    timeline = simulate(build("chimera", num_ranks, num_microbatches), Costs(backward=1))
    assert timeline.makespan == 2 * num_microbatches + num_ranks - 2
    assert max(timeline.peak_activations) == num_ranks


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (2, 8), (3, 6), (3, 9), (4, 8), (4, 12)])
def test_hanayos_waves_leave_half_of_1f1bs_bubble(num_ranks: int, num_microbatches: int) -> None:
    # Of a model cut into twice as many stages 1F1B is idle for 6(P-1).
    timeline = simulate(build("hanayo", num_ranks, num_microbatches))
    assert timeline.makespan == 6 * num_microbatches + 3 * (num_ranks - 1)
