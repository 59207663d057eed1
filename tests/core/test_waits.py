"""WAITs in the simulator: a rank stands still until its send or exchange is complete."""

from __future__ import annotations

import random

import pytest

from drumline.core.action import WAIT_OPS, Op
from drumline.core.costs import Costs
from drumline.core.lower.lower import lower
from drumline.core.lower.torch_text import for_torch
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import makespans, simulate
from drumline.core.timeline.idle import Cause
from programs import build
from some import some

SLOW = Costs(message_bytes=2, bytes_per_second=1)  # a message takes 2
WAITING = (
    "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0WAIT_SEND_F1\n"
    "1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1WAIT_SEND_B0,1B1,1SEND_B1,1WAIT_SEND_B1"
)


def times(program: Program, costs: Costs) -> dict[str, float]:
    timeline = simulate(program, costs)
    return {
        str(action): start
        for track in timeline.tracks
        for action, start in zip(track.actions, track.starts, strict=True)
    }


def without_waits(program: Program) -> Program:
    return Program.of([action for action in row if action.op not in WAIT_OPS] for row in program.rows)


def test_a_rank_goes_on_when_its_message_has_moved() -> None:
    program = Program.parse(WAITING)
    assert times(without_waits(program), SLOW)["0F1"] == 1
    found = times(program, SLOW)
    # 0F0 takes 1 and its message 2; 1F0, 1B0 and 1F1 take until 7, and the gradient has been moving since 6.
    assert (found["0F1"], found["1F0"], found["1F1"], found["1B1"]) == (3, 3, 6, 8)
    assert found["0B0"] == 8


def test_a_message_that_is_not_taken_keeps_the_rank() -> None:
    program = Program.parse("0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1")
    late = Program.parse(
        "0F0,0SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F0,0WAIT_SEND_F1,0F2,0SEND_F2,0WAIT_SEND_F2\n"
        "1RECV_F0,1F0,1RECV_F1,1F1,1RECV_F2,1F2"
    )
    assert times(program, Costs())["0F1"] == 1
    # 1RECV_F1 is posted only once 1F0 is done, at 2.
    assert times(late, Costs())["0F2"] == 2
    assert times(without_waits(late), Costs())["0F2"] == 2
    assert times(late, Costs(forward=[1, 5]))["0F2"] == 6
    assert times(without_waits(late), Costs(forward=[1, 5]))["0F2"] == 2


def test_idle_time_before_a_wait_is_told_and_adds_up() -> None:
    timeline = simulate(Program.parse(WAITING), SLOW)
    kept = [idle for idle in timeline.causes if idle.waits_for is not None and idle.waits_for.op is Op.SEND_F]
    assert [(idle.rank, idle.start, idle.end, idle.cause) for idle in kept] == [(0, 1.0, 3.0, Cause.TRANSFER)]
    assert kept[0].why == "the rank itself is busy with 0SEND_F0"
    for rank, idle in enumerate(some(timeline.idle)):
        assert sum(cause.seconds for cause in timeline.causes if cause.rank == rank) == pytest.approx(idle)
    assert timeline.critical_path[0].action.op is Op.FORWARD


def test_a_rank_waits_for_its_exchange() -> None:
    costs = Costs(reduce=4)
    waits = Program.parse("0F0,1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD")
    assert times(waits, costs)["0B0"] == 8
    assert times(without_waits(waits), costs)["0B0"] == 4
    (kept,) = [idle for idle in simulate(waits, costs).causes if idle.before is not None]
    assert (kept.cause, kept.start, kept.end) == (Cause.TRANSFER, 4, 8)
    assert kept.why == "its gradients are being exchanged"


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "dualpipe-v"])
def test_the_waits_of_an_export_cost_nothing(name: str) -> None:
    program = build(name, 3, 5)
    older, newer = (Program.parse(for_torch(program, communication=True, version=text)) for text in ("2.13", "2.15"))
    for costs in (Costs(), Costs(comm=0.5), SLOW, Costs(message_bytes=2, bytes_per_second=1, overlap=False)):
        assert simulate(newer, costs).makespan == simulate(older, costs).makespan
    many = [Costs(), Costs(forward=3)]
    assert makespans(newer, many).tolist() == [simulate(newer, cost).makespan for cost in many]


@pytest.mark.slow
def test_what_is_simulated_is_what_is_valid_with_waits_too() -> None:
    rng = random.Random(4)
    refused = 0
    for _ in range(60):
        rows = [list(row) for row in lower(build(rng.choice(["1f1b", "zb-v"]), 3, 3)).rows]
        for row in rows:
            for send in [action for action in row if action.op in (Op.SEND_F, Op.SEND_B)]:
                if rng.random() < 0.98:
                    wait = send._replace(op=Op.WAIT_SEND_F if send.op is Op.SEND_F else Op.WAIT_SEND_B)
                    row.insert(rng.randint(row.index(send) + (rng.random() < 0.98), len(row)), wait)
        program = Program.of(rows)
        if validate(program):
            refused += 1
            with pytest.raises(InvalidProgram):
                simulate(program)
        else:
            assert simulate(program, SLOW).makespan >= simulate(without_waits(program), SLOW).makespan
    assert 10 <= refused <= 50
