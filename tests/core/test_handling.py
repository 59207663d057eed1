from __future__ import annotations

import pytest

from drumline.core.costs import Costs
from drumline.core.measured.costs import Handling
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.schedules import generate
from prediction import handled
from records import PROGRAM, two_ranks


def test_handling_is_what_the_records_have_beside_computing() -> None:
    found = Handling.measured([Measured(PROGRAM, two_ranks(step, 1000 * (step + 1))) for step in range(3)])
    # Sends take 10 and 11, flights 1 and 10, takes 4 and 5, begins 2 and 8; of rank 0's step 20 ns are the executor's
    # own, beside begin and end, and of rank 1's 10, for two actions each.
    expected = Handling(send=10.5e-9, flight=5.5e-9, take=4.5e-9, action=7.5e-9, begin=5e-9, end=0.0)
    for name in Handling.__slots__:
        assert getattr(found, name) == pytest.approx(getattr(expected, name)), name


def test_messages_are_part_of_the_actions_that_make_and_need_them() -> None:
    program = generate("1f1b", num_ranks=3, num_microbatches=4)
    costs = handled(Costs(), Handling(send=0.1, flight=0.5, take=0.2, action=0.01), program)
    assert costs.per_stage("forward", 3) == pytest.approx((1.11, 1.31, 1.21))
    assert costs.per_stage("backward", 3) == pytest.approx((2.21, 2.31, 2.11))
    assert costs.per_stage("backward_input", 3) == pytest.approx((1.21, 1.31, 1.11))
    assert costs.per_stage("backward_weight", 3) == pytest.approx((1.01, 1.01, 1.01))
    assert costs.comm == 0.5


def test_stages_of_one_rank_hand_on_for_nothing() -> None:
    program = generate("zb-v", num_ranks=2, num_microbatches=4)  # stages 1 and 2 are on rank 1
    costs = handled(Costs(), Handling(send=0.1, take=0.2), program)
    assert costs.per_stage("forward", 4) == pytest.approx((1.1, 1.2, 1.1, 1.2))
    assert costs.per_stage("backward_input", 4) == pytest.approx((1.2, 1.1, 1.2, 1.1))


def test_a_prediction_with_handling_waits_for_copies_and_flights() -> None:
    program = Program.parse("0F0,0B0\n1F0,1B0")
    slower = handled(Costs(), Handling(send=0.1, flight=0.5, take=0.2, action=0.01), program)
    # F, B and again: four actions in a row, two messages of 0.8 each.
    assert simulate(program, slower).makespan == pytest.approx(6 + 4 * 0.01 + 2 * 0.8)
