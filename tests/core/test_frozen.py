"""Programs without the backwards that frozen stages do not need."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.errors import ProgramError
from drumline.core.lower.lower import lower
from drumline.core.lower.torch_text import for_torch
from drumline.core.program import Program
from drumline.core.prove.frozen import needed, prune, untrained
from drumline.core.prove.validate import validate
from drumline.core.rules import Backward
from drumline.core.simulate.simulate import simulate
from drumline.plan.cut.peaks import held_by
from drumline.report.draw.grid import grid
from drumline.report.draw.html import page
from drumline.report.draw.svg import svg
from drumline.report.draw.trace import trace
from matrices import examples, kinds
from programs import NAMES, admissible, build, costs_for, programs
from reference import reference_times, run_on_edge_channel
from refused import refused
from some import some


def frozen(name: str, ranks: int, microbatches: int, trainable: str) -> str:
    """Return the pruned rows; one digit of `trainable` for every stage."""
    return prune(build(name, ranks, microbatches), [digit == "1" for digit in trainable]).format()


def test_a_frozen_bottom_has_no_backward_and_gets_no_gradient() -> None:
    assert frozen("1f1b", 3, 2, "011") == "0F0,0F1\n1F0,1F1,1B0,1B1\n2F0,2B0,2F1,2B1"
    lowered = lower(prune(build("1f1b", 3, 2), [False, True, True]))
    assert [action for row in lowered.rows for action in row if action.op is Op.SEND_B and action.stage < 2] == []
    assert [action for action in lowered.rows[0] if action.op is Op.RECV_B] == []


def test_a_frozen_top_and_middle_only_hand_the_gradient_on() -> None:
    assert frozen("1f1b", 3, 2, "100") == "0F0,0F1,0B0,0B1\n1F0,1F1,1I0,1I1\n2F0,2I0,2F1,2I1"
    assert frozen("zb-h1", 2, 2, "10") == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1"


def test_the_lowest_trained_stage_keeps_its_split_backward() -> None:
    assert frozen("zb-h1", 2, 2, "01") == "0F0,0F1\n1F0,1I0,1F1,1I1,1W0,1W1"


def test_a_pair_is_taken_apart_where_its_backward_goes_or_is_halved() -> None:
    text = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1"
    assert str(prune(Program.parse(text), [False, True])) == "0F0,1F0,(0F1;1B0)OVERLAP_F_B,1F1,1B1"
    assert str(prune(Program.parse(text), [True, False])) == "0F0,1F0,0F1,1I0,0B0,1F1,1I1,0B1"
    swapped = text.replace("(0F1;1B0)", "(1B0;0F1)")
    assert str(prune(Program.parse(swapped), [True, False])) == "0F0,1F0,0F1,1I0,0B0,1F1,1I1,0B1"


def test_where_nothing_trains_only_forwards_are_left() -> None:
    assert frozen("chimera", 2, 2, "00") == "0F0,1F1\n0F1,1F0"
    assert prune(build("chimera", 2, 2), [False, False]).has_backward is False


def test_nothing_is_exchanged_or_updated_for_a_frozen_stage() -> None:
    program = prune(build("chimera", 4, 4), [False, True, False, True])
    assert {action.stage for action in program.work() if action.op is Op.REDUCE_GRAD} == {1, 3}
    program = prune(build("pipedream", 3, 3), [False, True, False])
    assert {action.stage for action in program.work() if action.op is Op.UPDATE} == {1}
    assert validate(program) == []


def test_pruning_twice_is_pruning_once() -> None:
    program = build("dualpipe", 4, 8)
    once = prune(program, [False, True, False, True])
    assert prune(once, [False, True, False, True]) is once
    assert prune(once, [False, False, False, True]) == prune(program, [False, False, False, True])
    assert prune(program, [True] * 4) is program


def test_a_program_without_the_gradients_of_a_trainable_stage_is_refused() -> None:
    once = prune(build("1f1b", 3, 4), [False, True, False])
    with refused(ProgramError, "stage 0 has trainable parameters, but no backward in the program '1f1b'"):
        prune(once, [True, True, False])
    with refused(ProgramError, "stage 2 has trainable parameters, but no weight gradients"):
        prune(once, [False, True, True])
    with refused(ProgramError, "has 3 stages", expected="per stage, not 2"):
        prune(once, [True, True])


def test_what_is_left_out_is_said() -> None:
    program = prune(build("1f1b", 5, 5), [False, False, True, False, True])
    assert list(untrained(program)) == ["no backward in stages 0-1", "no weight gradients in stage 3"]
    assert list(untrained(build("forward-only", 2, 2))) == []


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0F1\n1F0,1B0,1F1", "1B1 is missing"),
        ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1", "0B1 is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1\n2F0,2F1,2B0,2B1", "1B0 is missing, and so are 1I0 and 1W0"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1I0", "1I1 is missing, though stage 1 has it for other microbatches"),
        ("0F0,0F1,0I0,0I1\n1F0,1F1,1B0,1B1", "0W0 is missing, though 0I0 is there"),
        ("0F0,0F1\n1F0,1F1,1I0,1I1\n2F0,2F1,2B0,2B1", "1W1 is missing, though 1I1 is there"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1I0,1I1,1W1", "1W0 is missing, though 1I0 is there"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1I1", "1W1 is missing, though 1I1 is there"),
        ("0F0,0F1\n1F0,1F1,1B0,1B1,1REDUCE_GRAD,0REDUCE_GRAD", "exchanges gradients that rank 1 never makes"),
    ],
)
def test_what_is_forgotten_is_still_a_violation(text: str, says: str) -> None:
    program = Program.parse(text)
    assert any(says in str(violation) for violation in validate(program)), validate(program)
    with pytest.raises(ProgramError):
        simulate(program)


def test_a_message_to_a_stage_without_a_backward_is_stray() -> None:
    text = "0F0,0SEND_F0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0"
    assert any("carries data that no action uses" in str(violation) for violation in validate(Program.parse(text)))


def test_a_pair_is_held_until_the_last_that_its_stage_has() -> None:
    program = prune(build("zb-h1", 3, 3), [False, True, False])
    held = [[after for _, after in holding.pairs] for holding in simulate(program).memory]
    ends = {
        (action, rank): after
        for rank, row in enumerate(program.rows)
        for action, after in zip(row, held[rank], strict=True)
    }
    assert held[0] == [0, 0, 0]
    assert [(str(action), ends[action, 2]) for action in program.rows[2]] == [
        ("2F0", 1),
        ("2I0", 0),
        ("2F1", 1),
        ("2I1", 0),
        ("2F2", 1),
        ("2I2", 0),
    ]


def test_frozen_stages_hold_neither_gradients_nor_optimizer_state() -> None:
    costs = Costs(weight_bytes=10, gradient_bytes=5, optimizer_bytes=3, activation_bytes=[2, 4, 8])
    found = simulate(prune(build("1f1b", 3, 3), [False, True, False]), costs)
    assert [holding.static_bytes for holding in found.memory] == [10, 18, 10]
    assert [holding.bytes[-1][1] for holding in found.memory if holding.bytes] == [10, 18, 10]
    assert found.peak_bytes == (12, 26, 18)


def test_torch_is_not_given_what_it_would_wait_in() -> None:
    program = prune(build("1f1b", 3, 3), [False, True, False])
    with refused(ProgramError, "no backward in stage 0 and no weight gradients in stage 2"):
        for_torch(program)


def flags(num_stages: int) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=num_stages, max_size=num_stages)


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(st.data())
def test_a_pruned_program_is_proven_and_neither_longer_nor_larger(data: st.DataObject) -> None:
    whole = data.draw(programs())
    program = prune(whole, trainable := data.draw(flags(whole.num_stages)))
    assert validate(program) == []
    assert Program.parse(program.format()) == program
    assert program.backwards == (needed(trainable) if whole.has_backward else (Backward.NONE,) * whole.num_stages)
    costs = replace(data.draw(costs_for(whole)), overlapped=None, activation_bytes=4.0, held_until_weight_bytes=3.0)
    less, more = simulate(program, costs), simulate(whole, costs)
    assert less.makespan <= more.makespan + 1e-9
    assert all(some(a <= b for a, b in zip(less.peak_activations, more.peak_activations, strict=True)))
    assert less.peak_bytes is not None
    assert more.peak_bytes is not None
    assert all(a <= b for a, b in zip(less.peak_bytes, more.peak_bytes, strict=True))
    for rank, idle in some(enumerate(less.idle)):
        assert sum(cause.seconds for cause in less.causes if cause.rank == rank) == pytest.approx(idle)


@settings(max_examples=examples(100))
@given(st.data())
def test_a_pruned_program_runs_on_the_strictest_channel(data: st.DataObject) -> None:
    whole = data.draw(programs())
    trainable = data.draw(flags(whole.num_stages))
    lowered = lower(prune(whole, trainable))
    assert validate(lowered) == []
    run_on_edge_channel(lowered)
    spelled = prune(lower(whole), trainable)
    assert validate(spelled) == []
    run_on_edge_channel(spelled)
    assert sorted(map(str, spelled.work())) == sorted(map(str, lowered.work()))
    assert simulate(spelled).makespan <= simulate(lower(whole)).makespan + 1e-9


@settings(max_examples=examples(80))
@given(st.data())
def test_times_are_those_of_the_slow_simulator(data: st.DataObject) -> None:
    whole = data.draw(programs(tuple(name for name in NAMES if not name.startswith("pipedream"))))
    program = prune(whole, data.draw(flags(whole.num_stages)))
    costs = data.draw(costs_for(program))
    expected = reference_times(program, costs)
    for span in simulate(program, costs).spans():
        if span.action.is_compute:
            for part in some(span.action.work):
                assert (span.start, span.end) == pytest.approx(expected[part])


@settings(max_examples=examples(100))
@given(st.data(), st.randoms(use_true_random=False))
def test_a_single_forgotten_action_is_caught(data: st.DataObject, rng: random.Random) -> None:
    whole = data.draw(programs().filter(lambda program: program.num_microbatches > 1 and program.has_backward))
    rows = [list(row) for row in prune(whole, data.draw(flags(whole.num_stages).filter(any))).rows]
    places = [(r, i) for r, row in enumerate(rows) for i, action in enumerate(row) if action.is_compute]
    rank, index = rng.choice(places)
    rows[rank].pop(index)
    if all(rows):
        damaged = Program.of(rows)
        assert any("missing" in str(violation) for violation in validate(damaged))
        with pytest.raises(ProgramError):
            simulate(damaged)


@pytest.mark.parametrize("name", kinds(NAMES))
def test_what_a_rank_holds_is_counted_alike_for_cutting(name: str) -> None:
    for counts in admissible(name, 4, 5, 2):
        whole = build(name, *counts)
        if whole.num_updates:
            continue
        trainable = [stage % 3 == 1 for stage in range(whole.num_stages)]
        program = prune(whole, trainable)
        full = [float(3 + stage) for stage in range(program.num_stages)]
        until = [float(2 + stage % 2) for stage in range(program.num_stages)]
        costs = Costs(activation_bytes=full, held_until_weight_bytes=until)
        counted = [
            float(rank.stash(np.array([(full[stage], 0.0, until[stage]) for stage in rank.stages])))
            for rank in held_by(program)
        ]
        assert simulate(program, costs).peak_bytes == pytest.approx(counted)


def test_every_picture_can_be_drawn() -> None:
    timeline = simulate(prune(build("dualpipe", 4, 8), [False, True, False, True]), Costs(comm=0.5))
    assert "rank 3" in grid(timeline, memory=True)
    assert "<svg" in svg(timeline)
    assert "<html" in page([timeline])
    assert trace(timeline)
    assert {span.action.stage for span in timeline.critical_path if isinstance(span.action, Action)}
