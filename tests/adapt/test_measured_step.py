"""What a decision reads from a measured step, against a step that is written out by hand."""

from __future__ import annotations

import pytest

from drumline.adapt.measured_step import series_of, stage_seconds
from drumline.core.costs import Costs
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from simulated_runs import records_of

# Rank 0 makes messages at 1, 2 and 3 that travel for half a second; rank 1 takes them up at 1.5, 3.5 and 5.5:
# they wait 0, 1 and 2 seconds. Back, they are made at 3.5, 5.5 and 7.5, and taken up at 4, 6 and 8, at once.
PROGRAM = Program.parse("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1B0,1F1,1B1,1F2,1B2")
COSTS = Costs(forward=[1.0, 1.0], backward_input=[1.0, 1.0], backward_weight=[0.0, 0.0], comm=0.5)


def seen() -> Measured:
    return Measured(PROGRAM, tuple(records_of(simulate(PROGRAM, COSTS))))


def test_queues_count_how_long_messages_wait_in_all() -> None:
    series = series_of(seen())
    assert seen().makespan == pytest.approx(9.0)
    assert series["the queue of link 0-1"] == pytest.approx(1 + (0 + 1 + 2) / 9)
    assert series["the queue of link 1-0"] == pytest.approx(1.0)


def test_messages_count_with_a_typical_action() -> None:
    series = series_of(seen())
    assert [series[f"a message on link {edge}"] for edge in ("0-1", "1-0")] == pytest.approx([1.5, 1.5])
    assert {name: value for name, value in series.items() if "stage" in name} == pytest.approx(
        {f"{op} of stage {stage}": 1.0 for op in "FB" for stage in (0, 1)}
    )


def test_loads_and_stages_count_compute_alone() -> None:
    assert seen().busy == pytest.approx((6.0, 6.0))
    assert stage_seconds(seen()) == pytest.approx([2.0, 2.0])
