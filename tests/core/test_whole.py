"""Programs whose stages train so little that their backwards run whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.action import COMPUTE_OPS, Action, Op
from drumline.core.costs import Costs
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.prove.validate import validate
from drumline.core.prove.whole import LIGHT, is_light, join
from drumline.core.rules import Backward
from drumline.core.simulate.simulate import simulate
from drumline.schedules import schedules
from matrices import examples
from programs import NAMES, admissible, build, programs
from some import some

SPLIT = [name for name in NAMES if schedules()[name].splits_backward]


def joined(program: Program) -> Program:
    return join(program, [True] * program.num_stages)


def test_zb_h1_with_whole_backwards_is_1f1b() -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (3, 7), (1, 2)):
        assert joined(build("zb-h1", ranks, microbatches)) == build("1f1b", ranks, microbatches)


def test_zb_v_with_whole_backwards() -> None:
    assert str(joined(build("zb-v", 2, 2))) == "0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1"


def test_only_the_stages_that_are_named_change() -> None:
    split, whole = build("zb-h1", 3, 4), build("1f1b", 3, 4)
    assert join(split, [False, True, False]).rows == (split.rows[0], whole.rows[1], split.rows[2])
    assert join(whole, [True] * 3) is whole
    assert join(split, [False] * 3) is split


def test_a_stage_that_only_passes_the_gradient_on_keeps_its_i() -> None:
    program = prune(build("zb-h1", 3, 2), [True, False, True])
    assert program.backwards[1] is Backward.INPUT
    whole = joined(program)
    assert whole.rows[1] == program.rows[1]
    assert whole == prune(joined(build("zb-h1", 3, 2)), [True, False, True])


def test_light_is_a_share_of_the_weights() -> None:
    assert is_light(LIGHT * 200, 200)
    assert not is_light(LIGHT * 200 + 1, 200)
    assert not is_light(0, 200)


def orders(program: Program, ops: tuple[Op, ...]) -> dict[tuple[int, int], list[int | None]]:
    """Return the microbatches of these ops, by rank and stage."""
    found: dict[tuple[int, int], list[int | None]] = {}
    for rank, row in enumerate(program.rows):
        for part in (part for action in row for part in action.work if part.op in ops):
            found.setdefault((rank, part.stage), []).append(part.microbatch)
    return found


@pytest.mark.parametrize("name", SPLIT)
def test_gradients_are_summed_in_the_same_order(name: str) -> None:
    for counts in admissible(name, 4, 7, 4):
        program = build(name, *counts)
        summed = orders(program, (Op.BACKWARD, Op.BACKWARD_WEIGHT))
        assert orders(joined(program), (Op.BACKWARD,)) == summed


@given(program=programs(tuple(SPLIT)), seed=st.integers(0, 10**6))
@settings(max_examples=examples(60), deadline=None)
def test_a_joined_program_is_proven_and_holds_no_more_and_takes_no_longer_without_w(
    program: Program, seed: int
) -> None:
    draw = random.Random(seed)
    light = [draw.random() < 0.7 for _ in range(program.num_stages)]
    whole = join(program, light)
    assert validate(whole) == []
    assert validate(lower(whole)) == []
    for stage, is_joined in enumerate(light):
        assert _ops(whole, stage) == (_ops(program, stage) if not is_joined else {Op.FORWARD, Op.BACKWARD})
    forward = [draw.randint(1, 5) for _ in light]
    costs = Costs(forward=forward, backward_input=forward, backward_weight=0.0, comm=draw.choice([0.0, 0.5]))
    before, after = simulate(program, costs), simulate(whole, costs)
    assert after.makespan == pytest.approx(before.makespan)
    peaks = zip(after.peak_activations, before.peak_activations, strict=True)
    assert all(now <= then for now, then in some(peaks))


def _ops(program: Program, stage: int) -> set[Op]:
    return {part.op for part in program.work() if part.stage == stage and part.op in COMPUTE_OPS}


def test_a_w_that_takes_time_delays_stages_below_by_as_much_at_most() -> None:
    costs = Costs(backward_weight=0.1)
    split = build("zb-h1", 4, 8)
    assert simulate(joined(split), costs).makespan - simulate(split, costs).makespan == pytest.approx(2 * 3 * 0.1)


def test_messages_of_a_lowered_program_stay() -> None:
    lowered = lower(build("zb-h1", 2, 2))
    whole = joined(lowered)
    assert [action for row in whole.rows for action in row if not action.is_compute] == [
        action for row in lowered.rows for action in row if not action.is_compute
    ]
    assert Action(1, Op.BACKWARD, 0) in whole.rows[1]
