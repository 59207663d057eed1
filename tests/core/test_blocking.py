"""Messages that hold their ranks (`overlap=False`): the simulator sends and receives as `lower` spells it out."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given, settings

from drumline.core import rules
from drumline.core.action import SEND_OPS, TRANSFER_OPS, Action, Op
from drumline.core.costs import Costs
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from matrices import examples
from programs import build, programs
from reference import reference_times
from some import some

COSTS = Costs(message_bytes=2, bytes_per_second=4, overlap=False, reduce=3)
PAIRS = "0F0,0F1,0B0,0B1\n1F0,(1F1;1B0)OVERLAP_F_B,1B1\n2F0,2B0,2F1,2B1"


def moved(timeline: Simulation, rank: int) -> list[tuple[Action, float, float]]:
    return [(span.action, span.start, span.end) for span in timeline.occupied[rank]]


def test_a_pair_sends_its_activation_before_its_gradient() -> None:
    program = Program.parse(PAIRS)
    sends = [str(action) for action, *_ in moved(simulate(program, COSTS), 1) if action.op in SEND_OPS]
    assert sends == ["1SEND_F0", "1SEND_F1", "1SEND_B0", "1SEND_B1"]
    assert sends == [str(action) for action in lower(program).rows[1] if action.op in SEND_OPS]


@settings(max_examples=examples(60))
@given(programs())
def test_messages_leave_and_arrive_in_the_order_of_the_lowered_program(program: Program) -> None:
    timeline, lowered = simulate(program, COSTS), lower(program)
    sent: dict[tuple[int, int], list[Action]] = defaultdict(list)
    home = {
        part: rank
        for rank, row in enumerate(program.rows)
        for action in row
        if action.is_compute
        for part in action.work
    }
    for rank, row in enumerate(lowered.rows):
        sends = [action for action in row if action.op in SEND_OPS]
        assert [action for action, *_ in moved(timeline, rank) if action.op in SEND_OPS] == sends
        for action in sends:
            recv = rules.message_of(action).recv
            sent[rank, home[next(consumer for consumer in rules.consumers(recv) if consumer in home)]].append(recv)
    received: dict[tuple[int, int], list[Action]] = defaultdict(list)
    for rank in range(program.num_ranks):
        for action, *_ in moved(timeline, rank):
            if action.op not in SEND_OPS:
                made = next(producer for producer in rules.producers(action) if producer in home)
                received[home[made], rank].append(action)
    assert received == sent


@settings(max_examples=examples(60))
@given(programs())
def test_a_rank_does_one_thing_at_a_time(program: Program) -> None:
    timeline = simulate(program, COSTS)
    for rank, track in enumerate(timeline.tracks):
        spans = [
            *zip(track.starts, track.ends, strict=True),
            *((start, end) for _, start, end in moved(timeline, rank)),
        ]
        spans.sort()
        assert all(some(before[1] <= after[0] for before, after in pairwise(spans)))


def test_a_message_that_is_sent_early_and_taken_up_late_is_received_before_what_is_sent_behind_it() -> None:
    program = Program.parse("0F0,0F1,0F2\n1F1,1F0,1F2")
    timeline = simulate(program, COSTS)
    assert [str(action) for action, *_ in moved(timeline, 1)] == ["1RECV_F0", "1RECV_F1", "1RECV_F2"]
    assert list(timeline.tracks[1].starts) == [3.0, 4.0, 5.5]
    assert reference_times(program, COSTS)[Action.parse("1F1")] == (3.0, 4.0)


def test_a_send_that_is_spelled_out_holds_its_rank_where_it_stands() -> None:
    late = Program.parse("0F0,0F1,0SEND_F0,0SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1")
    assert [(str(action), start) for action, start, _ in moved(simulate(late, COSTS), 0)] == [
        ("0SEND_F0", 2.0),
        ("0SEND_F1", 2.5),
    ]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 6), (6, 6)])
def test_gradients_are_exchanged_behind_the_sends_that_hold_their_ranks(ranks: int, microbatches: int) -> None:
    program = build("chimera", ranks, microbatches)
    # Rank by rank, until when it is held by what stands before its exchanges; the copies wait for each other.
    for given_program in (program, lower(program)):
        timeline = simulate(given_program, COSTS)
        free = {}
        for rank, row in enumerate(lower(program).rows):
            first = next(at for at, action in enumerate(row) if action.op is Op.REDUCE_GRAD)
            assert all(some(action.op is Op.REDUCE_GRAD for action in row[first:]))
            free[rank] = max([timeline.tracks[rank].ends[-1], *(end for *_, end in moved(timeline, rank))])
        assert timeline.exchanges
        for span in timeline.exchanges:
            copies = [exchange.rank for exchange in timeline.exchanges if exchange.action == span.action]
            assert span.start == max(free[rank] for rank in copies)


def test_an_exchange_that_stands_before_a_send_does_not_wait_for_it() -> None:
    text = "0F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1REDUCE_GRAD,1SEND_B0".replace("0F0,", "0F0,0SEND_F0,", 1)
    before = simulate(Program.parse(text), COSTS)
    behind = simulate(Program.parse(text.replace("1REDUCE_GRAD,1SEND_B0", "1SEND_B0,1REDUCE_GRAD")), COSTS)
    ended = before.tracks[1].ends[-1]
    assert [span.start for span in before.exchanges] == [ended]
    assert [span.start for span in behind.exchanges] == [ended + 0.5]


def test_every_message_is_sent_and_received() -> None:
    program = build("dualpipe", 4, 8)
    timeline = simulate(program, COSTS)
    lowered = [action for row in lower(program).rows for action in row if action.op in TRANSFER_OPS]
    assert sorted(action for rank in range(4) for action, *_ in moved(timeline, rank)) == sorted(lowered)
