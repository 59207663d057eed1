"""Traces made by hand, most from simulated timelines: what analysis finds are their times, causes and clocks."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.costs import Costs
from drumline.core.errors import TraceError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Cause
from drumline.core.timeline.timeline import Timeline
from drumline.report.kineto.analysis import analyze
from drumline.report.kineto.clocks import align
from drumline.report.kineto.load import load
from drumline.report.summary import idle_by_cause
from kineto_traces import BEGIN, MESSAGE_BYTES, UNIT, Event, event, info, mark, save, written
from matrices import examples
from names import build
from refused import refused
from some import some

MILLI = 1e-3
CLOSE = 5e-9  # times are written to the thousandth of a microsecond

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "interleaved-zb", "looped-bfs", "forward-only")


def times(timeline: Timeline, unit: float = 1.0) -> list[float]:
    return [
        unit * item for track in timeline.tracks for pair in zip(track.starts, track.ends, strict=True) for item in pair
    ]


def seconds_of(timeline: Timeline, cause: Cause) -> list[float]:
    return idle_by_cause(timeline).get(cause.value, [0.0] * timeline.num_ranks)


@pytest.mark.parametrize(
    ("name", "style"),
    [
        *((name, style) for name in SCHEDULES for style in ("host", "device")),
        *((name, style) for name in ("gpipe", "1f1b") for style in ("numbered", "links")),
    ],
)
def test_times_and_causes_are_those_of_the_timeline_behind_the_traces(name: str, style: str, tmp_path: Path) -> None:
    expected = simulate(build(name, 4, 6), Costs(forward=2, backward_input=3, backward_weight=1.5, comm=0.25))
    found = load([written(expected, tmp_path, style=style)]).step()
    assert found.program == expected.program
    assert found.program.name == name
    assert times(found) == pytest.approx(times(expected, MILLI), abs=CLOSE)
    for cause in Cause:
        wanted = [MILLI * duration for duration in seconds_of(expected, cause)]
        assert seconds_of(found, cause) == pytest.approx(wanted, abs=100 * CLOSE), cause
    assert [(t.action, t.num_bytes) for t in sorted(found.transfers, key=lambda transfer: transfer.action)] == [
        (item.action, MESSAGE_BYTES) for item in sorted(expected.transfers, key=lambda transfer: transfer.action)
    ]


def test_a_device_counts_its_kernels_and_not_the_profilers_annotations(tmp_path: Path) -> None:
    expected = simulate(build("1f1b", 2, 4))
    found = load([written(expected, tmp_path, style="device")]).step()
    assert found.busy == pytest.approx([MILLI * value for value in expected.busy], abs=1e-7)
    assert found.kernel_seconds == pytest.approx([0.8 * MILLI * value for value in expected.busy], abs=1e-7)
    assert load([written(expected, tmp_path / "host")]).step().kernel_seconds is None


@settings(max_examples=examples(30))
@given(st.sampled_from(["1f1b", "interleaved-1f1b", "zb-v"]), st.lists(st.integers(-400, 400), min_size=3, max_size=3))
def test_clocks_of_several_hosts_are_put_right_within_the_error_that_is_reported(name: str, skews: list[int]) -> None:
    expected = simulate(build(name, 3, 6), Costs(comm=0.05))
    with TemporaryDirectory() as folder:
        offsets = [10.0 * skew for skew in skews]
        path = written(expected, Path(folder), skews=offsets, hosts=["a", "b", "c"])
        traces = load([path])
    found = traces.step()
    for rank in range(3):
        off = traces.alignment.shifts[rank] / 1e3 + offsets[rank] - offsets[0]
        assert abs(off) * 1e3 <= traces.alignment.errors[rank] + 1
    assert traces.alignment.contradiction == 0
    for transfer in some(found.transfers):
        assert transfer.made <= transfer.end + CLOSE
    for rank in range(3):
        assert sum(cause.seconds for cause in found.causes if cause.rank == rank) == pytest.approx(found.idle[rank])


def test_clocks_that_contradict_no_message_stay_as_they_are(tmp_path: Path) -> None:
    expected = simulate(build("1f1b", 2, 4), Costs(comm=0.5))
    traces = load([written(expected, tmp_path, skews=[0.0, 100.0], hosts=["a", "b"])])
    assert traces.alignment.shifts == (0, 0)
    assert 100_000 <= traces.alignment.errors[1] < 1_000_000


def test_messages_in_one_direction_leave_the_error_of_the_clocks_open(tmp_path: Path) -> None:
    expected = simulate(build("forward-only", 2, 4), Costs(comm=0.1))
    found = analyze([written(expected, tmp_path, skews=[0.0, -5000.0], hosts=["a", "b"])]).summary()
    assert found["clocks"]["error_seconds"] == [0.0, None]
    assert found["clocks"]["shift_seconds"][1] == pytest.approx(4.9e-3, abs=1e-6)
    assert "their remaining error is unknown" in found["clocks"]["in_words"]


def test_ranks_of_one_host_share_its_clock(tmp_path: Path) -> None:
    expected = simulate(build("1f1b", 4, 6), Costs(comm=0.01))
    skews = [0.0, 0.0, 3000.0, 3000.0]
    traces = load([written(expected, tmp_path, skews=skews, hosts=["a", "a", "b", "b"])])
    assert traces.alignment.shifts[:2] == (0, 0)
    assert traces.alignment.shifts[2] == traces.alignment.shifts[3] == pytest.approx(-3_000_000, abs=10_001)


def test_clocks_that_drift_are_said_to() -> None:
    found = align(2, [(0, 1, 100, 50), (1, 0, 100, 60)])
    assert found.contradiction == 45
    assert found.errors == (0.0, math.inf)
    within = align(2, [(0, 1, 100, 50), (1, 0, 100, 150)])
    assert (within.shifts, within.errors, within.contradiction) == ((0, 50), (0.0, 0.0), 0)


@given(st.data())
def test_no_message_arrives_before_it_is_sent_once_clocks_are_aligned(data: st.DataObject) -> None:
    number = data.draw(st.integers(1, 5))
    clock = st.integers(0, number - 1)
    skews = data.draw(st.lists(st.integers(-1000, 1000), min_size=number, max_size=number))
    sent = data.draw(st.lists(st.tuples(clock, clock, st.integers(0, 500), st.integers(0, 50)), max_size=20))
    messages = [(a, b, time + skews[a], time + took + skews[b]) for a, b, time, took in sent if a != b]
    found = align(number, messages)
    assert found.contradiction == 0
    late = [entry for entry in messages if entry[2] + found.shifts[entry[0]] > entry[3] + found.shifts[entry[1]] + 1]
    assert late == []  # but for rounding: whole numbers are half a unit off each


def test_a_slow_stage_is_named_and_the_advice_is_to_move_layers_off_it(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 4, 8), Costs(forward=[1, 1, 3, 1], backward=[2, 2, 6, 2]))
    analysis = analyze([written(timeline, tmp_path)])
    assert analysis.slowest.stage == 2
    assert analysis.slowest.total == pytest.approx(9 * MILLI, abs=CLOSE)
    said = "Move layers off stage 2: a microbatch takes 9 ms there and 4.5 ms on average."
    assert analysis.advice.sentence.startswith(said)


def test_the_ideal_is_the_same_order_and_times_without_transfer(tmp_path: Path) -> None:
    program = build("1f1b", 3, 5)
    moving, still = (simulate(program, Costs(comm=comm)) for comm in (2.0, 0.0))
    analysis = analyze([written(moving, tmp_path)])
    assert analysis.ideal is not None
    assert analysis.ideal.makespan == pytest.approx(still.makespan * MILLI, abs=1e-7)
    lost = moving.makespan - still.makespan
    assert analysis.advice.sentence.startswith(
        f"Messages are the bottleneck: waiting for messages on their way costs about {lost:.3g} ms"
    )


def test_the_advice_names_a_schedule_that_would_be_faster(tmp_path: Path) -> None:
    analysis = analyze([written(simulate(build("gpipe", 4, 8), Costs(backward=2)), tmp_path)])
    said = analysis.advice.sentence
    name = said.removeprefix("Run ").partition(":")[0]
    assert said.startswith(f"Run {name}: with the median times of these stages it takes ")
    assert simulate(build(name, 4, 8)).makespan < simulate(build("gpipe", 4, 8)).makespan
    assert max(simulate(build(name, 4, 8)).peak_activations) <= 8
    assert said.endswith("assuming that both halves of the backward take equally long.")


def by_hand(folder: Path, *ranks: Sequence[Event], hosts: Sequence[str] = ()) -> list[Path]:
    """Write traces of these events, times in milliseconds since the begin."""
    found = []
    for rank, events in enumerate(ranks):
        for entry in events:
            entry["ts"] = BEGIN + entry["ts"] * UNIT
            entry["dur"] *= UNIT
        name = {"host_name": hosts[rank] if hosts else "one"}
        found.append(save(folder / f"rank{rank}.json", events, distributedInfo=info(rank, len(ranks)), **name))
    return found


def receive(name: str, posted: float, done: float) -> list[Event]:
    return [
        mark(f"PP:{name}", posted, posted),
        event("cpu_op", "c10d::recv_", posted, posted),
        mark("gloo:recv", posted, done),
    ]


def send(name: str, posted: float, done: float) -> list[Event]:
    return [
        mark(f"PP:{name}", posted, posted),
        event("cpu_op", "c10d::send", posted, posted),
        mark("gloo:send", posted, done),
    ]


def causes(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    found = [cause for cause in timeline.causes if cause.rank == rank]
    return [(idle.cause.value, round(1e3 * idle.start, 6), round(1e3 * idle.end, 6)) for idle in found]


def test_every_stretch_of_a_gap_has_the_cause_that_its_trace_proves(tmp_path: Path) -> None:
    first = [
        mark("my step", -1, 30),  # holds whole actions: it explains no gap
        mark("PP:0F0", 0, 2),
        mark("logging", 2, 2.5),
        *send("0SEND_F0", 3, 3.25),
        mark("PP:0F1", 4, 6),
        *send("0SEND_F1", 6, 6),
        mark("Optimizer.step#SGD.step", 7, 8),
    ]
    second = [
        *receive("1RECV_F0", 0, 5),
        mark("PP:1F0", 0.5, 7),
        *receive("1RECV_F1", 7.25, 8),
        mark("PP:1F1", 7.75, 9),
    ]
    timeline = load(by_hand(tmp_path, first, second)).step()
    assert timeline.program.format() == "0F0,0F1\n1F0,1F1"
    assert causes(timeline, 0) == [
        ("overhead", 2, 2.5),  # logging
        ("unexplained", 2.5, 3),
        ("transfer", 3, 3.25),  # the host waits until its message is sent
        ("unexplained", 3.25, 4),
        ("drain", 6, 7),
        ("overhead", 7, 8),
        ("drain", 8, 9),
    ]
    assert causes(timeline, 1) == [
        ("fill", 0, 2),  # until 0F0 is made
        ("overhead", 2, 3),  # made, not yet sent
        ("transfer", 3, 5),
        ("unexplained", 7, 7.75),  # 1F1's input is there; it was not even asked for until 7.75
        ("transfer", 7.75, 8),
    ]
    words = [cause.why for cause in timeline.causes]
    assert "the rank is busy with logging; 0F1 comes after it" in words
    assert "0F0 of rank 0 is done, but its output is not yet sent to 1F0" in words
    assert "the rank itself is busy with 0SEND_F0" in words
    assert not [word for word in words if "my step" in word]


def test_labels_of_torch_2_15_say_what_was_waited_for(tmp_path: Path) -> None:
    first = [
        mark("PP:0F0", 0, 2),
        *send("0SEND_F0", 2, 2),
        mark("PP:0WAIT_SEND_F0", 2, 3.5),
        mark("PP:0F1", 3.5, 5),
        *send("0SEND_F1", 5, 5),
        mark("PP:0WAIT_SEND_F1", 5, 6),
    ]
    second = [
        *receive("1RECV_F0", 0, 2),
        mark("PP:1F0", 0, 3),
        *receive("1RECV_F1", 3, 5),
        mark("PP:1F1", 3, 7),
    ]
    timeline = load(by_hand(tmp_path, first, second)).step()
    assert timeline.ran.rows[0] == Program.parse("0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1").rows[0]
    assert timeline.program.format() == "0F0,0F1\n1F0,1F1"
    assert validate(timeline.ran, channel="rank") == []
    assert causes(timeline, 0) == [("transfer", 2, 3.5), ("transfer", 5, 6), ("drain", 6, 7)]
    assert [cause.why for cause in timeline.causes if cause.rank == 0][:2] == [
        "the rank itself is busy with 0SEND_F0",
        "the rank itself is busy with 0SEND_F1",
    ]


def test_a_gradient_exchange_that_is_waited_for_is_transfer(tmp_path: Path) -> None:
    labels = [
        *(("0F0", 0, 1), ("1F0", 1, 2), ("1B0", 2, 4), ("1REDUCE_GRAD", 4, 4.25), ("1WAIT_REDUCE_GRAD", 4.25, 6)),
        *(("0B0", 6, 8), ("0REDUCE_GRAD", 8, 8), ("0WAIT_REDUCE_GRAD", 8, 9)),
    ]
    found = analyze(by_hand(tmp_path, [mark(f"PP:{name}", start, end) for name, start, end in labels]))
    assert [str(action) for action in found.timeline.ran.rows[0]] == [name for name, *_ in labels]
    assert found.violations == ()
    assert causes(found.timeline, 0) == [("overhead", 4, 4.25), ("transfer", 4.25, 6)]
    assert found.timeline.causes[-1].why == "its gradients are being exchanged"


def test_microbatches_number_on_where_a_step_runs_its_schedule_twice(tmp_path: Path) -> None:
    rows = [mark(f"PP:{text}", at, at + 1) for at, text in enumerate(["0F0", "0F1", "0B0", "0B1"] * 2)]
    timeline = load(by_hand(tmp_path, [mark("ProfilerStep#7", -1, 20), *rows])).step()
    assert timeline.step == 7
    assert timeline.program.format() == "0F0,0F1,0B0,0B1,0F2,0F3,0B2,0B3"
    assert validate(timeline.ran) == []


def test_without_the_profilers_steps_every_turn_of_the_schedule_is_one(tmp_path: Path) -> None:
    rows = [mark(f"Forward {at % 2}", at, at + 0.5 + at / 10) for at in range(6)]
    traces = load(by_hand(tmp_path, rows))
    assert [step.program.format() for step in traces.steps.values()] == ["0F0,0F1"] * 3
    assert traces.typical() == 1  # the second of three is neither the shortest nor the longest


def test_a_step_that_is_cut_off_is_told_apart(tmp_path: Path) -> None:
    rows = [mark(f"ProfilerStep#{step}", 10 * step, 10 * step + 9) for step in range(3)]
    rows += [
        mark(f"PP:{text}", 10 * step + at, 10 * step + at + 1)
        for step in range(3)
        for at, text in enumerate(["0F0", "0B0"][: 2 - step // 2])
    ]
    traces = load(by_hand(tmp_path, rows))
    assert list(traces.steps) == [0, 1]
    assert traces.incomplete == (2,)
    with refused(TraceError, "step 2 is not complete"):
        traces.step(2)
    with refused(TraceError, "step 9 is not in the traces", expected="one of the steps 0, 1"):
        traces.step(9)


def test_other_text_behind_pp_is_no_action(tmp_path: Path) -> None:
    rows = [mark("PP:0F0", 0, 1), mark("PP:warmup", 1, 2), mark("PP::fwd_send (stage 0)", 2, 3), mark("PP:0B0", 3, 4)]
    timeline = load(by_hand(tmp_path, rows)).step()
    assert timeline.ran.format() == "0F0,0B0"
    assert [cause.why for cause in timeline.causes] == [
        "no measurement says what the rank did",
        "the rank is busy with PP::fwd_send (stage 0); 0B0 comes after it",
    ]


def test_of_several_pipelines_beside_each_other_the_first_is_read(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 2, 3), Costs(comm=0.1))
    written(timeline, tmp_path)
    pipelines = [(0, 2), (1, 3)]
    for rank in (1, 0):  # stage 1 lives on ranks 2 and 3, stage 0 on 0 and 1
        events = json.loads(gzip.decompress((tmp_path / f"rank{rank}.json.gz").read_bytes()))["traceEvents"]
        for global_rank in (2 * rank, 2 * rank + 1):
            group = pipelines[global_rank % 2]
            header = {
                "distributedInfo": info(global_rank, 4, [("mesh_dp", (0, 1)), ("mesh_pp", group)]),
                "host_name": "one",
            }
            save(tmp_path / f"trace{global_rank}.json", events, **header)
    files = [tmp_path / f"trace{rank}.json" for rank in range(4)]
    traces = load(files)
    assert [member.rank for member in traces.members] == [0, 2]
    assert traces.num_others == 1
    assert traces.step().program == timeline.program
    assert [member.rank for member in load([files[1], files[3]]).members] == [1, 3]
    with refused(TraceError, "there is no trace of rank 2, but the pipeline has ranks 0, 2"):
        load([files[0], files[1], files[3]])


def test_rows_that_no_pipeline_could_have_run_are_said_to_be(tmp_path: Path) -> None:
    rows = [mark("PP:0B0", 0, 1), mark("PP:0F0", 1, 2)]
    analysis = analyze(by_hand(tmp_path, rows))
    assert [str(violation) for violation in analysis.violations] == ["rank 0, position 0: 0B0 runs before 0F0"]
    assert analysis.ideal is None
    assert analysis.summary()["ideal"] is None
    assert "cannot run" in analysis.advice.sentence


def linked(number: int, forward: float, backward: float) -> list[Event]:
    """One op, its backward, and autograd's link between them."""
    start, end = (
        {"ph": kind, "cat": "fwdbwd", "name": "fwdbwd", "id": number, "ts": at, "dur": 0.0}
        for kind, at in (("s", forward), ("f", backward))
    )
    return [
        event("cpu_op", "aten::mm", forward, forward + 0.5, **{"Sequence number": number}),
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", backward, backward + 0.75),
        start,
        end,
    ]


def unlabelled(*pairs: tuple[float, float]) -> list[Event]:
    """Two forwards and two backwards, with a message behind the first and before the last."""
    ops = [entry for number, pair in enumerate(pairs) for entry in linked(number, *pair)]
    calls = [event("cpu_op", "c10d::send", 0.75, 0.8), event("cpu_op", "c10d::recv_", 2.8, 2.9)]
    return [*ops, *calls, mark("gloo:send", 0.76, 0.8), mark("gloo:recv", 2.85, 2.9)]


def test_a_run_on_a_device_that_was_not_recorded_is_refused(tmp_path: Path) -> None:
    hidden = [entry for entry in unlabelled((0, 2), (1, 3)) if not entry["name"].startswith("gloo")]
    with refused(TraceError, "has sends and receives of a device, but no device was recorded"):
        load(by_hand(tmp_path, hidden))


def test_backwards_that_belong_to_other_forwards_are_refused_without_labels(tmp_path: Path) -> None:
    with refused(TraceError, "backward 1 belongs to forward 0, but there are no labels"):
        load(by_hand(tmp_path, unlabelled((0, 3), (1, 2))))
    with refused(TraceError, "no trace of a rank after it"):
        load(by_hand(tmp_path, unlabelled((0, 2), (1, 3))))
    third = [*linked(2, 4, 5)[:1], *linked(2, 4, 3)[2:]]
    with refused(TraceError, "backward 1 belongs to forward 2, but there are no labels"):
        load(by_hand(tmp_path, [*unlabelled((0, 2), (1, 3)), *third]))
    third = [*linked(2, 4, 5)[:1], *linked(2, 4, 3)[2:]]
    with refused(TraceError, "3 forwards and 2 backwards, but no labels"):
        load(by_hand(tmp_path, [mark("ProfilerStep#0", -1, 9), *unlabelled((0, 2), (1, 3)), *third]))
