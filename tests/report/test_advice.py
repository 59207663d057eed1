"""Which schedule a comparison recommends, and what it says about the others."""

from __future__ import annotations

from drumline.core.costs import Costs
from drumline.core.timeline.idle import Limit
from drumline.report.compare import compare, recommend


def test_the_fastest_exact_schedule_is_recommended() -> None:
    said = str(recommend(compare(4, num_microbatches=8)))
    assert said.startswith("Run zb-v: 5.9% bubble, at most 4 microbatches held on a rank; 1f1b takes 29% longer.")


def test_stale_weights_are_not_recommended_however_fast() -> None:
    rows = [row for row in compare(4, num_microbatches=8) if row.name in ("pipedream-2bw", "1f1b")]
    assert rows[0].name == "pipedream-2bw"
    assert str(recommend(rows)).startswith("Run 1f1b")


def test_two_copies_of_the_weights_are_mentioned() -> None:
    costs = Costs(overlapped=1.5)
    rows = [row for row in compare(8, num_microbatches=32, costs=costs) if row.name in ("dualpipe", "1f1b")]
    said = str(recommend(rows))
    assert "two copies of the weights" in said


def test_a_limit_that_nothing_keeps_is_said() -> None:
    said = str(recommend(compare(4, num_microbatches=8, limit=Limit(max_activations=0.5))))
    assert said == "Nothing fits the limit: naive holds the least, 1 microbatch."


def test_nothing_to_compare_is_said() -> None:
    assert str(recommend([])) == "No schedule supports these counts."
