"""Schedules in slices: every one that the registry has, in an order that runs, with the times of its formula."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from drumline.core.costs import Costs
from drumline.core.errors import ScheduleError
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.schedules import find, generate, schedules
from drumline.schedules.equal_slices import equal_slices_seconds
from drumline.schedules.formulas import Pace, Paces
from drumline.schedules.registry import made_by, recipe_of
from matrices import chosen
from refused import refused
from some import some

ABLE = [name for name, schedule in schedules().items() if not schedule.not_in_slices]
REST = [name for name in schedules() if name not in ABLE]
COUNTS = ((1, 1, 2), (2, 1, 3), (3, 2, 2), (4, 3, 8), (5, 2, 4))


def test_the_schedules_that_slices_are_made_for_are_able() -> None:
    assert {"gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "looped-bfs", "forward-only"} <= set(ABLE)
    assert set(REST) >= {"dualpipe", "dualpipe-v", "chimera", "pipedream", "pipedream-2bw"}


@pytest.mark.parametrize(("name", "counts"), chosen(ABLE, COUNTS, times=2))
def test_slices_go_forward_in_order_and_backward_in_reverse(name: str, counts: tuple[int, int, int]) -> None:
    ranks, count, slices = counts
    program = generate(name, num_ranks=ranks, num_microbatches=count, slices=slices)
    assert not validate(program)
    assert (program.num_microbatches, program.num_slices) == (count, slices)
    for line in some(str(program).splitlines()):
        words = re.findall(r"(\d+)([A-Z])(\d+)\.(\d+)", line)
        for stage, m in some({(stage, m) for stage, _, m, _ in words}):
            forward, back = (
                [int(part) for other, op, n, part in words if (other, n) == (stage, m) and op in ops]
                for ops in ("F", "BI")
            )
            assert forward == list(range(slices))
            assert back in ([], list(range(slices))[::-1])


@pytest.mark.parametrize("name", REST)
def test_the_others_are_refused_with_the_reason(name: str) -> None:
    assert find(name).not_in_slices
    with refused(ScheduleError, f"^{name} cannot run microbatches in 4 slices: ", fix="use 1f1b"):
        generate(name, num_ranks=4, num_microbatches=8, slices=4)


@pytest.mark.parametrize(("slices", "what"), [(0, "slices is 0"), ([], r"slices is \[\]"), ([5, 0], "slices is"),
                                              (True, "slices is True"), (2.0, "slices is 2.0")])  # fmt: skip
def test_a_number_of_slices_is_whole(slices: object, what: str) -> None:
    with refused(ScheduleError, what):
        generate("1f1b", num_ranks=2, num_microbatches=2, slices=slices)  # type: ignore[arg-type]


def test_lengths_say_how_many_slices_there_are() -> None:
    by_number, by_lengths = (generate("1f1b", num_ranks=2, num_microbatches=2, slices=each) for each in (3, [7, 6, 3]))
    assert by_number == by_lengths


def test_a_sliced_program_is_known_by_its_schedule() -> None:
    program = generate("zb-h1", num_ranks=3, num_microbatches=2, slices=4)
    assert recipe_of(program.rearranged(program.rows, "custom")).name == "zb-h1 in 4 slices"
    more = made_by("zb-h1", program, 5)
    assert more is not None
    assert (more.num_microbatches, more.num_slices) == (5, 4)


# ---- formulas ----------------------------------------------------------------------------------------------------

EXACT = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zb-h1")
MANY = ((2, 2, 4), (3, 2, 3), (4, 2, 4), (4, 4, 8), (8, 2, 8))


@pytest.mark.parametrize(("name", "counts"), chosen(EXACT, MANY, times=2))
def test_equal_slices_take_the_time_of_as_many_short_microbatches(name: str, counts: tuple[int, int, int]) -> None:
    ranks, count, slices = counts
    schedule = find(name)
    v = schedule.stages_per_rank
    assert schedule.makespan is not None
    wanted = schedule.makespan(Paces([Pace(ranks, 1 / slices, 1.5 / slices, 0.5 / slices)], count * slices, v))
    program = generate(name, num_ranks=ranks, num_microbatches=count, slices=slices)
    assert simulate(program, Costs(1 / v, 1.5 / v, 0.5 / v)).makespan == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(("name", "counts"), chosen(EXACT, [*MANY, (4, 1, 2), (6, 1, 4), (8, 2, 3)], times=3))
def test_a_formula_is_given_only_where_it_holds(name: str, counts: tuple[int, int, int]) -> None:
    ranks, count, slices = counts
    program = generate(name, num_ranks=ranks, num_microbatches=count, slices=slices)
    costs = Costs(1, 1.5, 0.5, microbatch_factor=3)
    formula = equal_slices_seconds(program, costs)
    if formula is None:
        assert (
            count * slices < ranks
            or (name == "zb-h1" and (count - 1) * slices < ranks - 1)
            or (find(name).makespan_holds is not None)
        )
    else:
        assert simulate(program, costs).makespan == pytest.approx(formula, rel=1e-12)
        uneven = replace(costs, attention=0.6)
        assert equal_slices_seconds(program, uneven) == formula
        assert simulate(program, uneven).makespan > formula


def test_no_formula_is_given_for_other_costs_or_schedules() -> None:
    program = generate("1f1b", num_ranks=4, num_microbatches=4, slices=4)
    assert equal_slices_seconds(program, Costs()) is not None
    assert equal_slices_seconds(generate("zb-h1", num_ranks=4, num_microbatches=1, slices=4), Costs()) is None
    for costs in (Costs(comm=1), Costs(forward=[1, 1, 1, 2]), Costs(recompute=True), Costs(bytes_per_second=1)):
        assert equal_slices_seconds(program, costs) is None
    assert equal_slices_seconds(generate("1f1b", num_ranks=4, num_microbatches=4), Costs()) is None
    assert equal_slices_seconds(generate("zb-v", num_ranks=4, num_microbatches=4, slices=4), Costs()) is None


def test_zb_h1_fills_its_bubble_with_weights_of_an_earlier_microbatch() -> None:
    """With one microbatch there is none: I and F of the other ranks stay idle."""
    for slices in (2, 4, 8):
        alone = simulate(generate("zb-h1", num_ranks=4, num_microbatches=1, slices=slices))
        assert alone.makespan == pytest.approx(3 + 3 * 2 / slices)


@pytest.mark.parametrize(("ranks", "count", "slices"), MANY)
def test_1f1b_holds_a_microbatch_and_a_slice_for_each_later_rank(ranks: int, count: int, slices: int) -> None:
    """Seq1F1B (arXiv 2406.03488): rank 0 holds s + p - 1 of p*s slices, and its bubble is (p-1)(F+B)/s."""
    program = generate("1f1b", num_ranks=ranks, num_microbatches=count, slices=slices)
    timeline = simulate(program, Costs(activation_bytes=slices))
    assert timeline.peak_activations == tuple(min(count * slices, slices + ranks - 1 - rank) for rank in range(ranks))
    assert timeline.peak_bytes == tuple(map(float, timeline.peak_activations))
    assert timeline.makespan - 3 * count == pytest.approx((ranks - 1) * 3 / slices)


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(("ranks", "slices"), [(2, 2), (2, 8), (4, 4), (4, 16), (8, 16)])
def test_interleaved_slices_hold_one_microbatch_and_little_more(ranks: int, slices: int, stages: int) -> None:
    """SlimPipe's order (arXiv 2504.14519), with slices a multiple of ranks: one microbatch, of a model on p ranks.

    Beyond that, a rank holds two pairs for each later rank, of v*s pairs that a microbatch has there.
    """
    program = generate("interleaved-1f1b", num_ranks=ranks, num_microbatches=3, stages_per_rank=stages, slices=slices)
    timeline = simulate(program, Costs(1 / stages, 1 / stages, 1 / stages, activation_bytes=1 / stages))
    pairs = stages * slices
    later = [ranks - 1 - rank for rank in range(ranks)]
    assert timeline.peak_activations == tuple(min(pairs + 2 * each, 3 * pairs) for each in later)
    assert timeline.peak_bytes == pytest.approx([min(1 + 2 * each / pairs, 3) for each in later])
    assert timeline.makespan - 9 == pytest.approx((ranks - 1) * 3 / pairs)
