"""A mixture of experts in the simulator: what skews the pipeline, and what brings it back to the dense baseline."""

from __future__ import annotations

import pytest

from virtual_pipeline import Virtual, one_f_one_b, profile, settings

pytestmark = pytest.mark.slow

EXPERTS = dict.fromkeys(range(16, 24), 2.5)  # the last third of the blocks takes so many times as long


def ratio(run: Virtual) -> float:
    """Return bubble over utilisation of the last step."""
    bubble = run.steps[-1].bubble
    return bubble / (1 - bubble)


def test_another_cut_brings_experts_back_to_the_dense_baseline_and_more_microbatches_do_not() -> None:
    dense = ratio(Virtual(one_f_one_b(8), (12, 12)).run(4))
    kept = settings(rebalance="keep", program=False)
    skewed = [
        ratio(Virtual(one_f_one_b(number), (12, 12), timed=profile(24, EXPERTS), settings=kept).run(4))
        for number in (8, 16, 32)
    ]
    assert skewed[0] > 2 * dense
    assert skewed[0] > skewed[1] > skewed[2] > 1.15 * dense, "the cut stays as uneven as it was"
    moved = Virtual(one_f_one_b(8), (12, 12), timed=profile(24, EXPERTS)).run(20)
    assert moved.decider.now.counts != (12, 12)
    assert ratio(moved) <= 1.15 * dense


def test_a_profile_of_the_dense_model_leads_to_the_same_cut() -> None:
    known = Virtual(one_f_one_b(8), (12, 12), timed=profile(24, EXPERTS)).run(40)
    found = Virtual(one_f_one_b(8), (12, 12), truth=profile(24, EXPERTS)).run(80)
    assert abs(found.decider.now.counts[0] - known.decider.now.counts[0]) <= 1
    assert found.steps[-1].makespan <= 1.1 * known.steps[-1].makespan
