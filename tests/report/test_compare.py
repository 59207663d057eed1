"""Comparisons of schedules: who is compared, in which order, and how wide the table is."""

from __future__ import annotations

import pytest

from drumline.core.costs import Costs
from drumline.core.errors import CostsError
from drumline.core.timeline.idle import Limit
from drumline.report.compare import compare, compare_page, compare_table, left_out_text, recommend
from drumline.report.draw.table import table
from names import NAMES
from refused import refused
from some import some


def test_every_training_schedule_is_compared_best_first() -> None:
    rows = compare(4, num_microbatches=8)
    assert {row.name for row in rows} == set(NAMES) - {"forward-only"}
    times = [row.seconds_per_microbatch for row in rows]
    assert times == sorted(times)
    assert rows[-1].name == "naive"


def test_every_row_does_the_same_work_per_microbatch() -> None:
    costs = Costs(forward=2, backward_input=3, backward_weight=1)
    for row in some(compare(4, num_microbatches=8, costs=costs, stages_per_rank=4)):
        busy = max(row.timeline.busy) / row.timeline.program.num_microbatches
        assert busy == pytest.approx(6)


def test_schedules_that_do_not_admit_the_counts_are_left_out_with_the_reason() -> None:
    rows = compare(3, num_microbatches=2)
    assert [schedule.name for schedule in rows.left_out] == ["dualpipe", "chimera", "pipedream-2bw"]
    assert {row.name for row in rows} == set(NAMES) - {"dualpipe", "chimera", "pipedream-2bw", "forward-only"}
    assert rows.left_out[0].summary() == {
        "schedule": "dualpipe",
        "stages_per_rank": 1,
        "error": "dualpipe cannot use 3 ranks: its two directions meet in the middle",
        "expected": "an even number of ranks",
        "fix": "use 2 or 4",
    }
    assert left_out_text(rows.left_out).splitlines()[2].startswith("left out: pipedream-2bw with 2 microbatches")
    assert compare(4, num_microbatches=8).left_out == ()


def test_what_is_too_large_with_two_stages_per_rank_is_named_and_not_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("drumline.schedules.registry.MAX_PAIRS", "drumline.report.compare.MOST_PAIRS"):
        monkeypatch.setattr(limit, 20)
    rows = compare(4, num_microbatches=4)
    names = [schedule.name for schedule in rows.left_out]
    assert {"zb-v", "interleaved-1f1b", "hanayo"} <= set(names)
    assert {schedule.stages_per_rank for schedule in rows.left_out} == {2}
    assert left_out_text(rows.left_out) == (
        f"left out: {', '.join(names)}: 4 ranks x 2 stages x 4 microbatches is too large; "
        "expected at most 20 (stage, microbatch) pairs"
    )
    assert str(recommend(rows)).endswith(f" Not compared: {', '.join(names)}.")
    page = compare_page(rows, num_ranks=4, num_microbatches=4)
    assert "Not compared" in page
    assert "4 ranks x 2 stages x 4 microbatches is too large" in page


def test_a_named_schedule_without_a_backward_is_left_out_by_name() -> None:
    rows = compare(2, num_microbatches=2, only=["forward-only", "1f1b"])
    assert [row.name for row in rows] == ["1f1b"]
    assert left_out_text(rows.left_out) == "left out: forward-only has no backward; expected schedules that train"
    assert [schedule.name for schedule in compare(2, num_microbatches=2).left_out] == []


def test_what_is_over_the_limit_comes_last() -> None:
    rows = compare(4, num_microbatches=8, limit=Limit(max_activations=3))
    fits = [row.fits for row in rows]
    assert fits == sorted(fits, reverse=True)
    assert {row.name for row in rows if row.fits} == {"v-half", "v-min", "naive"}
    assert "over the limit" in compare_table(rows)
    by_bytes = compare(4, num_microbatches=8, costs=Costs(activation_bytes=10), limit=Limit(max_bytes=35))
    assert {row.name for row in by_bytes if row.fits} == {"v-half", "v-min", "naive"}


def test_costs_per_stage_cannot_be_compared() -> None:
    with refused(CostsError, "forward has one value per stage"):
        compare(4, num_microbatches=8, costs=Costs(forward=[1, 2, 3, 4]))


def test_tables_are_cut_at_the_width() -> None:
    drawn = table(["a", "b"], [["x" * 30, "y" * 30]], width=40)
    assert all(len(line) <= 40 for line in drawn.splitlines())


def test_columns_that_do_not_fit_are_left_out_whole() -> None:
    drawn = table(["name", "first", "second"], [["gpipe", "123456", "7.25"]], width=14)
    assert drawn.splitlines() == ["name    first", "gpipe  123456", "(1 more column"]


def test_microbatch_factors_are_repeated_for_every_step() -> None:
    rows = compare(2, num_microbatches=2, costs=Costs(microbatch_factor=[1, 2]))
    assert {"pipedream-2bw", "1f1b"} <= {row.name for row in rows}
