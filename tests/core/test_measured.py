"""Measured timelines from records made by hand, whose every nanosecond is known."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from drumline.core.action import Action
from drumline.core.measured.account import Doing, Period, _about, account, parts_of, summed_parts
from drumline.core.measured.measured import Measured
from drumline.core.measured.metrics import step_metrics
from drumline.core.measured.record import BETWEEN, OVERHEADS, Record
from drumline.core.program import Program
from drumline.core.timeline.attribute import attribute
from drumline.core.timeline.idle import Cause
from records import PROGRAM, two_ranks
from some import some


def same(rank: int, moment: int) -> int:
    return moment


def measured() -> Measured:
    return Measured(PROGRAM, two_ranks())


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def told(record: Record) -> list[tuple[str, int]]:
    return [(str(piece.doing), piece.end - piece.start) for piece in account(record, same)]


def test_a_step_is_laid_out_without_gaps() -> None:
    first, second = two_ranks()
    assert told(first) == [
        ("overhead", 8),
        ("nothing", 2),
        ("compute", 100),
        ("nothing", 1),
        ("send", 10),
        ("nothing", 4),
        ("wait", 197),
        ("flight", 20),
        ("take", 5),
        ("nothing", 3),
        ("compute", 100),
        ("overhead", 4),
        ("nothing", 6),
    ]
    pieces = account(second, same)
    assert [piece.start for piece in pieces[1:]] == [piece.end for piece in pieces[:-1]]
    assert (pieces[0].start, pieces[-1].end) == (second.begin_ns, second.end_ns)


def test_the_parts_of_a_step_sum_to_it_exactly_and_unexplained_is_what_is_left() -> None:
    for record, parts in zip(two_ranks(), measured().parts, strict=True):
        assert nanoseconds(parts.total) == record.end_ns - record.begin_ns
        assert parts.unexplained >= 0
    first = measured().parts[0]
    found = (first.busy, first.transfer, first.wait, first.overhead, first.unexplained)
    assert [nanoseconds(value) for value in found] == [200, 35, 197, 12, 16]


def test_columns_add_up_to_what_is_laid_out_in_time() -> None:
    for record in two_ranks():
        assert summed_parts(record, same) == parts_of(account(record, same))


def test_a_wait_for_what_was_made_before_is_all_transfer() -> None:
    first, second = two_ranks()
    early = replace(first, messages=[*first.messages[:5], first.begin_ns, *first.messages[6:]])
    parts = Measured(PROGRAM, (early, second)).parts[0]
    assert (nanoseconds(parts.wait), nanoseconds(parts.transfer)) == (0, 35 + 197)


def test_leaving_is_waiting_for_others() -> None:
    record = Record(0, begin_ns=0, end_ns=100, starts=[0], ends=[60], overheads=[OVERHEADS.index("leave"), 60, 90])
    assert summed_parts(record, same) == parts_of(account(record, same))
    assert nanoseconds(summed_parts(record, same).wait) == 30


def test_what_is_exchanged_while_the_rank_computes_counts_as_computing() -> None:
    record = Record(0, begin_ns=0, end_ns=100, starts=[0, 50], ends=[40, 80], exchanges=[0, 30, 90])
    assert told(record) == [("compute", 40), ("exchange", 10), ("compute", 30), ("exchange", 10), ("nothing", 10)]
    assert nanoseconds(summed_parts(record, same).transfer) == 20


def test_a_device_that_stands_still_before_a_message_waits_for_it() -> None:
    record = Record(
        1,
        begin_ns=0,
        end_ns=100,
        on_device=1,
        starts=[40, 80],
        ends=[60, 100],
        messages=[0, 1, 0, 0, 0, 25, 25, 5, 5, 6, 64],  # the host took it at 5, the device could only at 40
        overheads=[OVERHEADS.index("note"), 50, 65],  # the host is ahead of the device
    )
    assert told(record) == [
        ("stream wait", 5),
        ("take", 1),
        ("stream wait", 19),
        ("stream flight", 15),
        ("compute", 20),
        ("overhead", 5),
        ("nothing", 15),
        ("compute", 20),
    ]
    assert nanoseconds(summed_parts(record, same).unexplained) == 15


def test_what_a_device_has_yet_to_make_is_not_made_when_the_host_hands_it_over() -> None:
    first, second = two_ranks()
    at = first.begin_ns
    # The host of rank 0 hands 0F0's output over at 111, which its device makes only at 114; the receiver knows at 115.
    device = replace(first, on_device=1, starts=[at + 14, at + 350], ends=[at + 114, at + 450])
    host, own = (Measured(PROGRAM, (record, second)) for record in (first, device))
    made = [next(transfer.made for transfer in each.transfers if transfer.source == 0) for each in (host, own)]
    assert [nanoseconds(value) for value in made] == [101, 100]  # from the first action, which starts 4 later
    assert nanoseconds(own.parts[1].wait - host.parts[1].wait) == 3


def test_every_idle_interval_of_a_measured_step_has_the_cause_that_was_noted() -> None:
    timeline = measured()
    rank = [idle for idle in timeline.causes if idle.rank == 0]
    found = [(idle.cause, nanoseconds(idle.seconds), idle.why) for idle in rank if idle.cause is not Cause.UNEXPLAINED]
    assert found == [
        (Cause.TRANSFER, 10, "the rank itself is busy with 0SEND_F0"),
        (Cause.WAIT, 197, "0B0 waits for 1B0 of rank 1"),
        (Cause.TRANSFER, 20, "1B0 of rank 1 has finished and its output is on its way to 0B0"),
        (Cause.TRANSFER, 5, "the rank itself is busy with 0RECV_B0"),
    ]
    second = [idle for idle in timeline.causes if idle.rank == 1]
    assert (second[0].cause, second[0].why) == (Cause.FILL, "the pipeline fills; 1F0 waits for 0F0 of rank 0")
    assert (second[-1].cause, second[-1].why) == (Cause.DRAIN, "the pipeline drains; 0B0 of rank 0 ends last")


def test_causes_cover_the_idle_time_of_every_rank_without_gaps() -> None:
    timeline = measured()
    for rank, track in enumerate(timeline.tracks):
        edges = [(cause.start, cause.end) for cause in timeline.causes if cause.rank == rank]
        edges = sorted(edges + list(zip(track.starts, track.ends, strict=True)))
        assert [start for start, _ in edges[1:]] == pytest.approx([end for _, end in edges[:-1]], abs=1e-15)
        assert edges[0][0] == timeline.start
        assert edges[-1][1] == timeline.end
        idle = sum(cause.seconds for cause in timeline.causes if cause.rank == rank)
        assert idle == pytest.approx(timeline.idle[rank], abs=1e-15)


def test_a_rank_that_begins_late_is_outside_once_its_input_is_made() -> None:
    first, second = two_ranks()
    at = first.begin_ns
    late = replace(second, begin_ns=at + 116, waits=[], overheads=[])
    timeline = Measured(PROGRAM, (first, late))
    found = [(cause.cause, nanoseconds(cause.seconds)) for cause in timeline.causes if cause.rank == 1][:2]
    assert found == [(Cause.FILL, 100), (Cause.OUTSIDE, 6)]


def test_attribute_reads_the_measured_causes_of_a_measured_timeline() -> None:
    timeline = measured()
    assert attribute(timeline) == timeline.causes
    assert {idle.cause for idle in timeline.causes} >= {Cause.UNEXPLAINED, Cause.TRANSFER}


def test_what_happens_between_steps_is_there_by_kind() -> None:
    first, second = two_ranks()
    at = first.begin_ns
    kinds = [BETWEEN.index("update"), at - 500, at - 300, BETWEEN.index("data"), at - 200, at - 80]
    timeline = Measured(PROGRAM, (replace(first, since_ns=at - 600, between=kinds), second))
    assert [(period.rank, period.kind, nanoseconds(period.end - period.start)) for period in timeline.between] == [
        (0, "update", 200),
        (0, "data", 120),
    ]
    metrics = step_metrics(PROGRAM, timeline.records)
    assert metrics["pp/rank0/outside_seconds"] == pytest.approx((600 - 320) * 1e-9)
    assert metrics["time_metrics/data_loading(s)"] == pytest.approx(120e-9)
    assert metrics["time_metrics/data_loading(%)"] == pytest.approx(100 * 120 / 1060)


def test_metrics_are_what_the_timeline_says() -> None:
    timeline = measured()
    metrics = step_metrics(PROGRAM, timeline.records)
    assert metrics["pp/makespan_seconds"] == pytest.approx(timeline.makespan)
    assert metrics["pp/bubble"] == pytest.approx(timeline.bubble)
    assert metrics["pp/span_bubble"] == pytest.approx(timeline.span_bubble)
    assert metrics["pp/stage1/busy_seconds"] == pytest.approx(timeline.busy[1])
    assert metrics["pp/rank1/wait_seconds"] == timeline.parts[1].wait
    for (source, target), curve in some(timeline.queue_depths.items()):
        assert metrics[f"pp/edge{source}-{target}/peak_queue"] == max(depth for _, depth in curve)


def test_the_stages_of_an_overlapped_pair_share_its_seconds() -> None:
    program = Program.parse("0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1")
    record = Record(0, end_ns=80, starts=range(0, 70, 10), ends=range(10, 80, 10), held=[0])
    metrics = step_metrics(program, [record])
    stages = {name: round(seconds * 1e9) for name, seconds in metrics.items() if name.startswith("pp/stage")}
    assert stages == {"pp/stage0/busy_seconds": 35, "pp/stage1/busy_seconds": 35}


def test_messages_and_waits_name_what_they_are_about() -> None:
    timeline = measured()
    assert [(str(item.action), item.source, item.target, item.num_bytes) for item in timeline.transfers] == [
        ("1SEND_B0", 1, 0, 64.0),
        ("0SEND_F0", 0, 1, 64.0),
    ]
    assert [(wait.rank, str(wait.action), str(wait.receive), wait.source) for wait in timeline.waits] == [
        (0, "0B0", "0RECV_B0", 1),
        (1, "1F0", "1RECV_F0", 0),
    ]


def test_a_wait_for_what_another_rank_made_in_its_step_before_names_nothing() -> None:
    wait = Period(0, 1, Doing.WAIT, 1, Action.parse("0RECV_B3"), 1)
    nothing: Any = SimpleNamespace(located={})
    made: Any = SimpleNamespace(located={Action.parse("1B3")[:3]: (1, 0)})
    assert _about(nothing, 0, wait) == (None, None)
    assert _about(made, 0, wait) == (Action.parse("1B3"), 1)


def test_a_captured_step_has_the_metrics_that_need_no_action_times() -> None:
    timed = two_ranks()
    captured = [replace(record, starts=[], ends=[], held=[]) for record in timed]
    found, every = step_metrics(PROGRAM, captured), step_metrics(PROGRAM, timed)
    assert found
    assert found.keys() < every.keys()
    assert found == {name: every[name] for name in found}
