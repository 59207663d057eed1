"""Handling: the seconds of messages and copies that a rank spends beside computing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.measured.costs import Handling, costs_of, exchange_seconds, replay
from drumline.core.measured.measured import Measured
from drumline.core.measured.record import OVERHEADS, Record
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.state_actions import with_state
from drumline.schedules import generate
from handling import with_handling
from records import PROGRAM, two_ranks
from simulated_runs import nanoseconds, records_of


def test_handling_is_what_the_records_have_beside_computing() -> None:
    found = Handling.measured([Measured(PROGRAM, two_ranks(step, 1000 * (step + 1))) for step in range(3)])
    # Sends take 10 and 11, flights 1 and 10, takes 4 and 5, begins 2 and 8; of rank 0's step 20 ns are the executor's
    # own, beside begin and end, and of rank 1's 10, for two actions each.
    expected = Handling(send=10.5e-9, flight=5.5e-9, take=4.5e-9, action=7.5e-9, begin=5e-9, end=0.0)
    for name in Handling.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_messages_are_part_of_the_actions_that_make_and_need_them() -> None:
    program = generate("1f1b", num_ranks=3, num_microbatches=4)
    costs = with_handling(Costs(), Handling(send=0.1, flight=0.5, take=0.2, action=0.01), program)
    assert costs.per_stage("forward", 3) == pytest.approx((1.11, 1.31, 1.21))
    assert costs.per_stage("backward", 3) == pytest.approx((2.21, 2.31, 2.11))
    assert costs.per_stage("backward_input", 3) == pytest.approx((1.21, 1.31, 1.11))
    assert costs.per_stage("backward_weight", 3) == pytest.approx((1.01, 1.01, 1.01))
    assert costs.comm == 0.5


def test_stages_of_one_rank_hand_on_for_nothing() -> None:
    program = generate("zb-v", num_ranks=2, num_microbatches=4)  # stages 1 and 2 are on rank 1
    costs = with_handling(Costs(), Handling(send=0.1, take=0.2), program)
    assert costs.per_stage("forward", 4) == pytest.approx((1.1, 1.2, 1.1, 1.2))
    assert costs.per_stage("backward_input", 4) == pytest.approx((1.2, 1.1, 1.2, 1.1))


def test_a_prediction_with_handling_waits_for_copies_and_flights() -> None:
    program = Program.parse("0F0,0B0\n1F0,1B0")
    slower = with_handling(Costs(), Handling(send=0.1, flight=0.5, take=0.2, action=0.01), program)
    # F, B and again: four actions in a row, two messages of 0.8 each.
    assert simulate(program, slower).makespan == pytest.approx(6 + 4 * 0.01 + 2 * 0.8)


def exchanging(name: str, overhead: float) -> Measured:
    """Return a step in which an executor takes so long for every action, and stages exchange their gradients."""
    program = with_state(generate(name, num_ranks=2, num_microbatches=8), frozenset({Op.REDUCE_GRAD}))
    each = 1.0 + overhead
    step = simulate(program, Costs(each, each, each, backward=2.0 + overhead, comm=0.02, reduce=1.5))
    records = []
    for record in records_of(step, overhead=overhead):
        spans = [span for span in step.exchanges if span.rank == record.rank]
        rows = [
            (span.action.stage, *(nanoseconds(at, record.begin_ns) for at in (span.start, span.end))) for span in spans
        ]
        records.append(replace(record, exchanges=[number for row in rows for number in row]))
    return Measured(program, tuple(records))


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v"])
def test_a_step_with_exchanges_is_predicted_from_its_own_costs(name: str) -> None:
    exact, slow = exchanging(name, 0.0), exchanging(name, 0.1)
    assert exchange_seconds([exact], exact.program.num_stages)["reduce"] == pytest.approx(
        [1.5] * exact.program.num_stages
    )
    assert simulate(exact.program, costs_of([exact])).makespan == pytest.approx(exact.makespan, rel=1e-6)
    assert replay(exact).makespan == pytest.approx(exact.makespan, rel=1e-6)
    costs = costs_of([slow])
    handled = with_handling(costs, Handling.measured([slow]), slow.program)
    bare, whole = (simulate(slow.program, cost).makespan / slow.makespan for cost in (costs, handled))
    assert bare < 0.95 < whole < 1.0  # a part of it hides in waits


def test_gathered_parameters_are_no_gradients() -> None:
    program = Program.parse("0UNSHARD,0F0,0B0,0REDUCE_GRAD,0RESHARD")
    record = Record(
        0, begin_ns=0, end_ns=99, starts=[0, 10, 20, 50], ends=[2, 20, 40, 51], exchanges=[0, 1, 9, 0, 40, 60]
    )
    spans = Measured(program, (record,)).exchanges
    assert [str(span.action) for span in spans] == ["0UNSHARD", "0REDUCE_GRAD"]
    assert [span.start for span in spans] == pytest.approx([1e-9, 40e-9])
    assert exchange_seconds([Measured(program, (record,))], 1) == {"pack": 0.0, "reduce": pytest.approx([20e-9])}


def test_copying_gradients_together_is_no_exchange_and_waits_for_other_pipelines_hardly_count() -> None:
    program, post = Program.parse("0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD"), OVERHEADS.index("post")
    steps = []
    for late in (30, 0, 7, 0, 90):  # another pipeline is late by so much
        starts, ends = [0, 10, 20, 45], [10, 20, 40, 60]
        exchanges = [1, 41, 55 + late, 0, 61, 80 + late]
        record = Record(0, starts=starts, ends=ends, exchanges=exchanges, overheads=[post, 40, 44, post, 60, 66])
        steps.append(Measured(program, (replace(record, begin_ns=0, end_ns=100 + late),)))
    found = exchange_seconds(steps, 2)
    assert found["pack"] == pytest.approx([5e-9, 3e-9])
    assert found["reduce"] == pytest.approx([14e-9, 11e-9])
