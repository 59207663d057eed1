"""The numbers of the literature, held against the simulator. F = I = W = 1 and free messages unless stated."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from drumline.core.costs import Costs
from drumline.core.simulate.simulate import Simulation, simulate
from names import build


def run(name: str, ranks: int, microbatches: int, stages: int | None = None, **costs: Any) -> Simulation:
    return simulate(build(name, ranks, microbatches, stages), Costs(**costs))


def test_gpipe_and_1f1b_take_the_same_time_with_different_peaks() -> None:
    gpipe, one_f_one_b = run("gpipe", 4, 8), run("1f1b", 4, 8)
    assert (gpipe.makespan, gpipe.peak_activations) == (33, (8, 8, 8, 8))
    assert (one_f_one_b.makespan, one_f_one_b.peak_activations) == (33, (4, 3, 2, 1))


def test_latency_costs_1f1b_more_than_gpipe() -> None:
    costs: dict[str, Any] = {"forward": 10, "backward_input": 10, "backward_weight": 6, "comm": 1}
    assert run("1f1b", 8, 24, **costs).makespan == 860
    assert run("gpipe", 8, 24, **costs).makespan == 820


def test_a_heavy_first_stage() -> None:
    heavy = Costs(forward=[2, 1, 1, 1], backward_input=[2, 1, 1, 1], backward_weight=[2, 1, 1, 1])
    assert simulate(build("1f1b", 4, 8), heavy).makespan == 51
    assert simulate(build("gpipe", 4, 8), heavy).makespan == 57


def test_interleaved_and_breadth_first() -> None:
    interleaved, breadth_first = run("interleaved-1f1b", 4, 8), run("looped-bfs", 4, 8)
    assert (interleaved.makespan, interleaved.peak_activations) == (57, (11, 9, 7, 5))
    assert (breadth_first.makespan, breadth_first.peak_activations) == (57, (16,) * 4)


def test_zero_bubble_h1_and_h2() -> None:
    h1, h2 = run("zb-h1", 4, 8), run("zb-h2", 4, 8)
    assert (h1.makespan, h1.peak_activations) == (27, (4,) * 4)
    assert (h2.span, h2.makespan, h2.peak_activations) == (24, 27, (7,) * 4)


def test_zero_bubble_v() -> None:
    eight, six = run("zb-v", 4, 8), run("zb-v", 4, 6)
    assert (eight.span, eight.makespan, eight.peak_activations) == (48, 51, (8,) * 4)
    assert six.span == 38


@pytest.mark.parametrize(("name", "ranks", "microbatches"), [("dualpipe", 8, 20), ("dualpipe-v", 4, 10)])
def test_dualpipe(name: str, ranks: int, microbatches: int) -> None:
    timeline = run(name, ranks, microbatches, overlapped=3)
    assert timeline.makespan == 66
    assert timeline.idle == (6,) * ranks
    assert timeline.peak_activations == (9,) * ranks


@pytest.mark.parametrize(("half", "makespan"), [(0.5, 16), (1, 26)])
def test_chimera(half: float, makespan: float) -> None:
    assert run("chimera", 6, 6, backward_input=half, backward_weight=half).makespan == makespan


ZERO_BUBBLE_PAPER = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 0.2431, 0.1585, 0.1083),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 0.1240, 0.0674, 0.0444),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 0.2347, 0.1323, 0.0698),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 0.2552, 0.1397, 0.0672),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 0.2646, 0.1421, 0.0641),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 0.1352, 0.0594, 0.0257),
]


@pytest.mark.parametrize("row", ZERO_BUBBLE_PAPER, ids=lambda row: f"P{row[0]}-M{row[1]}-F{row[2]}")
def test_the_zero_bubble_papers_rates_to_four_decimals(row: tuple[float, ...]) -> None:
    ranks, microbatches, forward, backward_input, backward_weight, comm, *published = row
    costs = Costs(forward, backward_input, backward_weight, comm=comm)
    found = [
        round(simulate(build(name, int(ranks), int(microbatches)), costs).span_bubble, 4)
        for name in ("1f1b", "zb-h1", "zb-h2")
    ]
    assert found == published


def test_hand_made_zb_v_beats_the_published_search_at_32_ranks() -> None:
    timeline = run("zb-v", 32, 96, forward=9458, backward_input=9748, backward_weight=7288, comm=879)
    assert round(timeline.span_bubble, 4) == 0.0582


# Bubble formulas of the table, over a range of counts and costs.

COSTS = [(1.0, 1.0, 1.0), (2.0, 3.0, 1.5), (10.0, 9.0, 6.0)]


@pytest.mark.parametrize(("f", "i", "w"), COSTS)
@pytest.mark.parametrize("ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 14])
def test_gpipe_and_1f1b_idle_for_P_minus_1_whole_passes(
    ranks: int, microbatches: int, f: float, i: float, w: float
) -> None:
    for name in ("gpipe", "1f1b"):
        timeline = run(name, ranks, microbatches, forward=f, backward_input=i, backward_weight=w)
        assert timeline.idle == pytest.approx(((ranks - 1) * (f + i + w),) * ranks)


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "rounds"), [(2, 3), (4, 2), (5, 3)])
def test_looped_schedules_idle_for_as_long_with_v_times_the_work(ranks: int, rounds: int, stages: int) -> None:
    for name in ("interleaved-1f1b", "looped-bfs"):
        timeline = run(name, ranks, ranks * rounds, stages)
        assert timeline.idle == ((ranks - 1) * 3,) * ranks


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_interleaved_peaks(ranks: int, stages: int) -> None:
    expected = tuple((stages - 1) * ranks + 2 * (ranks - 1 - rank) + 1 for rank in range(ranks))
    assert run("interleaved-1f1b", ranks, 4 * ranks, stages).peak_activations == expected


@pytest.mark.parametrize(("f", "i", "w"), [(1, 1, 1), (3, 3, 2), (4, 4, 1)])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zero_bubble_formulas(ranks: int, f: float, i: float, w: float) -> None:
    costs: dict[str, Any] = {"forward": f, "backward_input": i, "backward_weight": w}
    microbatches = 4 * ranks
    work = microbatches * (f + i + w)
    assert run("zb-h1", ranks, microbatches, **costs).makespan - work == pytest.approx((ranks - 1) * (f + i - w))
    assert run("zb-h2", ranks, microbatches, **costs).span - work == pytest.approx((ranks - 1) * max(f + i - 2 * w, 0))
    assert run("zb-h1", ranks, microbatches).peak_activations == (ranks,) * ranks
    assert run("zb-h2", ranks, microbatches).peak_activations == (2 * ranks - 1,) * ranks


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_zb_v_has_no_bubble_in_any_span(ranks: int) -> None:
    for microbatches in (2 * ranks, 3 * ranks):
        timeline = run("zb-v", ranks, microbatches)
        assert timeline.span == 6 * microbatches
        assert max(timeline.peak_activations) == 2 * ranks


@pytest.mark.parametrize(("f", "i", "w", "c"), [(10, 10, 6, 1), (10, 9, 4, 1), (20, 18, 8, 2)])
@pytest.mark.parametrize("ranks", [4, 8])
def test_latency_formulas_within_their_conditions(ranks: int, f: float, i: float, w: float, c: float) -> None:
    assert w <= min(f, i) - 2 * c
    assert 4 * c <= w
    costs: dict[str, Any] = {"forward": f, "backward_input": i, "backward_weight": w, "comm": c}
    for microbatches in (2 * ranks, 4 * ranks):
        passes = (microbatches + ranks - 1) * (f + i + w)
        ideal = microbatches * (f + i + w)
        one_f_one_b = passes + c * (2 * (ranks - 1) * microbatches / ranks + 2 * (ranks - 2))
        assert run("1f1b", ranks, microbatches, **costs).makespan == pytest.approx(one_f_one_b)
        assert run("gpipe", ranks, microbatches, **costs).makespan == pytest.approx(passes + 2 * (ranks - 1) * c)
        h1 = (ranks - 1) * (f + i - w + 4 * c)
        assert run("zb-h1", ranks, microbatches, **costs).makespan - ideal == pytest.approx(h1)
        h2 = (ranks - 1) * (f + i - 2 * w + 2 * c)
        assert run("zb-h2", ranks, microbatches, **costs).span - ideal == pytest.approx(h2)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    [("dualpipe", 2, 4), ("dualpipe", 4, 8)]
    + [pytest.param("dualpipe", *counts, marks=pytest.mark.slow) for counts in ((8, 16), (8, 20), (10, 22))]
    + [("dualpipe-v", 2, 4), ("dualpipe-v", 4, 8), ("dualpipe-v", 5, 13)],
)
def test_dualpipe_idles_as_its_formula_says_where_it_applies(name: str, ranks: int, microbatches: int) -> None:
    half = ranks // 2 if name == "dualpipe" else ranks
    for f, w, share in itertools.product((0.5, 1, 2, 3), (0.25, 0.5, 1, 2, 3), (0, 0.25, 0.5, 1, 1.5)):
        if w > f:
            continue
        b = f + w
        fused = b + share * f  # from as long as a backward alone to longer than both
        timeline = run(name, ranks, microbatches, forward=f, backward_input=f, backward_weight=w, overlapped=fused)
        from_middle = [half - 1 - (min(r, ranks - 1 - r) if name == "dualpipe" else r) for r in range(ranks)]
        expected = [(half - 1) * (fused + b - 3 * w) - max(k - 1, 0) * (f + b - fused) for k in from_middle]
        assert timeline.idle == pytest.approx(expected)
        if share == 1:
            assert timeline.idle == pytest.approx([(half - 1) * (fused + b - 3 * w)] * ranks)


@pytest.mark.parametrize(("i", "w", "more"), [(1, 1.5, True), (1, 3, True), (0.5, 0.5, True), (1.5, 0.5, False)])
def test_dualpipe_s_formula_does_not_hold_for_other_costs(i: float, w: float, more: bool) -> None:
    idle = run("dualpipe", 8, 20, backward_input=i, backward_weight=w).idle
    formula = 3 * (1 + 2 * (i + w) - 3 * w)
    assert min(idle) > formula + 1e-9 if more else max(idle) < formula - 1e-9


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_chimera_idles_for_P_minus_2_backwards(ranks: int) -> None:
    timeline = run("chimera", ranks, ranks)
    assert timeline.idle == ((ranks - 2) * 2,) * ranks
    assert min(timeline.peak_activations) == ranks / 2 + 1
    assert max(timeline.peak_activations) <= max(ranks, 2)


@pytest.mark.parametrize("ranks", [8, 12, 16, 24])
def test_controllable_memory_schedules_trade_memory_for_bubble(ranks: int) -> None:
    """About half and a third of zb-v's peak, for about P/2M and 2P/3M of bubble."""
    microbatches = 4 * ranks
    half, least = run("v-half", ranks, microbatches), run("v-min", ranks, microbatches)
    assert max(half.peak_activations) <= ranks + 2
    assert max(least.peak_activations) <= 2 * ranks / 3 + 3
    assert half.makespan - 6 * microbatches <= 3 * ranks
    assert least.makespan - 6 * microbatches <= 4 * ranks


@pytest.mark.parametrize("ranks", [4, 6, 8])
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min", "dualpipe-v"])
def test_v_placement_respects_its_lower_bound(name: str, ranks: int) -> None:
    timeline = run(name, ranks, 4 * ranks)
    bound = 6 * 4 * ranks + 6 * ranks - 3 * max(timeline.peak_activations) - 1
    assert timeline.makespan >= bound


@pytest.mark.parametrize(("ranks", "microbatches", "stages"), [(4, 8, 2), (8, 16, 2), (8, 24, 2), (4, 8, 4)])
def test_hanayo_beats_1f1b_on_the_same_model(ranks: int, microbatches: int, stages: int) -> None:
    same_model = run("1f1b", ranks, microbatches, forward=stages, backward_input=stages, backward_weight=stages)
    assert run("hanayo", ranks, microbatches, stages).makespan < same_model.makespan


def test_asynchronous_programs_idle_only_at_their_ends() -> None:
    for ranks, microbatches in ((4, 16), (4, 64)):
        assert run("pipedream", ranks, microbatches).idle == ((ranks - 1) * 3,) * ranks
    assert run("pipedream-2bw", 4, 8).idle == (9,) * 4


def test_two_ranks_and_four_microbatches_cannot_pass_80_percent_with_a_flush() -> None:
    for name in ("gpipe", "1f1b"):
        assert run(name, 2, 4).bubble == pytest.approx(0.2)
    assert run("zb-h1", 2, 4).bubble < 0.2


def test_naive_runs_one_microbatch_at_a_time() -> None:
    timeline = run("naive", 4, 3)
    assert timeline.makespan == 3 * 4 * 3
    assert timeline.peak_activations == (1,) * 4
