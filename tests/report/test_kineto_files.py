"""Files that are no traces, or not those of one run, and the reading of those that are."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.core.action import Action
from drumline.core.costs import Costs
from drumline.core.errors import TraceError
from drumline.core.simulate.simulate import simulate
from drumline.report.kineto import events as kineto_events
from drumline.report.kineto.actions import LabelledAction
from drumline.report.kineto.calls import MessageEnd
from drumline.report.kineto.clocks import Alignment
from drumline.report.kineto.events import events
from drumline.report.kineto.load import described, load
from drumline.report.kineto.rank import _on_host, _others
from drumline.report.kineto.recording import Mark, read
from kineto_traces import BASE, BEGIN, Event, event, info, mark, save, written
from matrices import long
from names import build
from refused import refused, saying

TRACE = json.dumps({"schemaVersion": 1, "traceEvents": [mark("PP:0F0", 0, 1), mark("PP:0B0", 1, 2)], "traceName": "x"})


def put(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def iterations(path: Path) -> Path:
    deep = folder(folder(path) / "iteration_10")
    put(deep / "rank0.json", TRACE)
    return path


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda at: at / "nowhere.json", saying("No such file")),
        (lambda at: folder(at / "empty"), saying("contains no trace")),
        (lambda at: iterations(at / "all"), saying(fix="iteration_10")),
        (lambda at: put(at / "rank0.json", ""), saying("it begins with neither")),
        (lambda at: put(at / "rank0.json", "hello"), saying(r"not JSON: it begins with neither \{ nor \[, at 'hello'")),
        (lambda at: put(at / "rank0.json", "\x00\x01\x02"), saying("not JSON")),
        (lambda at: put(at / "rank0.json", '{"a" 1}'), saying("not JSON: a name is missing")),
        (lambda at: put(at / "rank0.json", '{"a": 1 "b": 2}'), saying("not JSON: a comma is missing")),
        (lambda at: put(at / "rank0.json", '{"a": nonsense}'), saying("not JSON: Expecting value")),
        (lambda at: put(at / "rank0.json", '{"a": 1, "b": [2]}'), saying("it has no traceEvents, only a, b")),
        (lambda at: put(at / "rank0.json", "{}"), saying("it has no traceEvents, only nothing")),
        (lambda at: put(at / "rank0.json", '{"traceEvents": ' + "[" * 100_000), saying("nested too deeply")),
        (lambda at: put(at / "rank0.json.gz", gzip.compress(TRACE.encode())[:40]), saying("damaged or cut off")),
        (lambda at: put(at / "rank0.json.gz", b"\x1f\x8b rubbish that is no gzip"), saying("damaged or cut off")),
        (lambda at: put(at / "rank0.json", '{"traceEvents": []}'), saying("contains no pipeline")),
        (lambda at: save(at / "rank0.json", [mark("train", 0, 1)]), saying("its labels are train")),
        (lambda at: put(at / "trace.json", TRACE), saying("nor its name says which rank it is from")),
    ],
)
def test_what_is_no_trace_is_refused_with_its_path_and_what_was_expected(
    make: Callable[[Path], Path], says: dict[str, str], tmp_path: Path
) -> None:
    path = make(tmp_path)
    with refused(TraceError, **says) as caught:
        load([path])
    assert str(path) in caught.value.error
    assert caught.value.expected


@pytest.mark.parametrize("length", range(1, len(TRACE), 7))
def test_a_trace_that_ends_early_is_said_to_be_cut_off(length: int, tmp_path: Path) -> None:
    path = put(tmp_path / "rank0.json", TRACE[:length])
    with refused(TraceError, "the trace is cut off"):
        load([path])


@pytest.mark.slow
def test_events_come_before_the_end_of_the_file_is_seen(tmp_path: Path) -> None:
    """What is cut off behind two megabytes yields what is before: a trace is not held as a whole."""
    many = [mark(f"PP:0F{number}", number, number + 1) for number in range(20_000)]
    text = json.dumps({"traceEvents": many})
    assert len(text) > 2 << 20
    stream = events(put(tmp_path / "rank0.json", text[:-100]), {})
    assert next(stream)["name"] == "PP:0F0"
    with refused(TraceError, "cut off"):
        list(stream)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@long
@given(
    st.lists(st.dictionaries(st.text(), VALUES, max_size=3), max_size=5),
    st.dictionaries(st.text().filter(lambda key: key != "traceEvents"), VALUES, max_size=3),
    st.sampled_from([None, 2]),
    st.integers(1, 9),
)
def test_reading_piece_by_piece_is_reading_as_a_whole(
    listed: list[Event], header: Event, indent: int | None, piece: int
) -> None:
    text = json.dumps({**header, "traceEvents": listed}, indent=indent)
    found: Event = {}
    with TemporaryDirectory() as home, mock.patch.object(kineto_events, "_PIECE", piece):
        assert list(events(put(Path(home, "rank0.json"), text), found)) == listed
    assert found == header


def test_a_bare_list_of_events_is_a_trace_as_well(tmp_path: Path) -> None:
    path = put(tmp_path / "rank0.json", json.dumps([mark("PP:0F0", 0, 1), 7, mark("PP:0B0", 1, 3)]))
    assert load([path]).step().program.format() == "0F0,0B0"


def test_odd_events_are_passed_over(tmp_path: Path) -> None:
    odd: list[Event] = [
        {},
        {"ph": "X"},
        {"ph": "X", "cat": "user_annotation", "name": "PP:0F9", "ts": "now", "dur": 1},
        {"ph": "X", "cat": "user_annotation", "name": "PP:0F8", "ts": 1, "dur": None},
        {"ph": "B", "cat": "user_annotation", "name": "PP:0F7", "ts": 1},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 1, "args": None},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1, "dur": 1, "args": {"correlation": 3}},
        {"ph": "s", "cat": "fwdbwd", "id": "seven", "ts": 1},
        {"ph": "X", "cat": ["user_annotation"], "name": "PP:0F6", "ts": 1, "dur": 1},
        mark("PP:0F0", 0, 1),
    ]
    recording = read(save(tmp_path / "rank0.json", odd))
    assert [action.name for action in recording.actions] == ["PP:0F0"]
    assert not recording.has_device


def two_ranks(tmp_path: Path) -> tuple[Path, Path]:
    written(simulate(build("1f1b", 2, 3), Costs(comm=0.1)), tmp_path)
    return tmp_path / "rank0.json.gz", tmp_path / "rank1.json.gz"


def again(path: Path, **header: object) -> Path:
    """Write a trace anew with another header, and with times that are off."""
    content = json.loads(gzip.decompress(path.read_bytes()))
    moved = header.pop("moved", 0.0)
    assert isinstance(moved, float)
    for post in content["traceEvents"]:
        post["ts"] += moved
    return put(path, gzip.compress(json.dumps({**content, **header}).encode()))


@pytest.mark.parametrize(
    ("header", "says"),
    [
        ({"distributedInfo": info(0, 2)}, "are both from rank 0"),
        ({"distributedInfo": info(1, 4)}, "world_size is 2"),
        ({"distributedInfo": {**info(1, 2), "backend": "nccl"}}, "backend is gloo"),
        ({"moved": 3.6e9}, "was recorded 3600 s apart"),
        ({"moved": 1e6}, "ends 984 ms before it begins on rank 1"),
    ],
)
def test_traces_of_different_runs_are_refused(header: dict[str, object], says: str, tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path)
    assert list(load([first, second]).steps) == [0]
    again(second, **header)
    with refused(TraceError, says) as caught:
        load([first, second])
    assert "one trace per rank, all from one run" in caught.value.expected


def test_ranks_without_a_step_in_common_are_refused(tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path)
    content = json.loads(gzip.decompress(second.read_bytes()))
    for post in content["traceEvents"]:
        post["name"] = post["name"].replace("ProfilerStep#0", "ProfilerStep#4")
    put(second, gzip.compress(json.dumps(content).encode()))
    with refused(TraceError, r"no step is complete on every rank \(rank 0: 0; rank 1: 4\)"):
        load([first, second])


def test_the_rank_may_be_in_the_name_of_the_file_alone(tmp_path: Path) -> None:
    first, second = two_ranks(tmp_path)
    expected = load([first, second]).step().program
    for path in (first, second):
        again(path, distributedInfo=None)
    assert load([second, first]).step().program == expected


def test_times_are_those_of_the_clock_that_the_header_names(tmp_path: Path) -> None:
    path = save(tmp_path / "rank0.json", [mark("PP:0F0", BEGIN, BEGIN + 1.5), event("cpu_op", "c10d::send", 2, 3)])
    recording = read(path)
    assert recording.actions[0].start == BASE + int(BEGIN) * 1000
    assert recording.actions[0].end - recording.actions[0].start == 1500


@pytest.mark.parametrize("label", ["PP:999999999F0", "PP:0F999999999", "Forward 999999999"])
def test_labels_with_numbers_that_no_run_has_are_refused(tmp_path: Path, label: str) -> None:
    also = "Backward 0" if label.startswith("Forward") else "PP:0B0"
    save(tmp_path / "rank0.json", [mark(label, 0, 1), mark(also, 1, 2)])
    with refused(TraceError, r"a label says \d+F\d+, but the traces have only 2 actions"):
        load([tmp_path / "rank0.json"])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), 1e300, 10**30, True, "1", None, [1]])
@pytest.mark.parametrize("field", ["ts", "dur"])
def test_events_without_a_time_are_passed_over(tmp_path: Path, field: str, number: object) -> None:
    odd = {**mark("PP:0F1", 3, 4), field: number}
    save(tmp_path / "rank0.json", [mark("PP:0F0", 0, 1), odd, mark("PP:0B0", 1, 2)])
    assert [action.name for action in read(tmp_path / "rank0.json").actions] == ["PP:0F0", "PP:0B0"]


def test_odd_arguments_of_events_are_passed_over(tmp_path: Path) -> None:
    kernel = event("kernel", "gemm", 0, 1)
    odd: list[object] = [10**30, 2.5, "x", None, [1]]
    events = [{**kernel, "args": {"correlation": value}} for value in odd] + [{**kernel, "args": [1]}]
    sent = event("cpu_op", "c10d::send", 0, 1)
    odd = [[], "x", {"Input Dims": [3], "Input type": ["float"]}]
    events += [{**sent, "args": value} for value in odd]
    events += [{**sent, "args": {"Input Dims": [[10**30]], "Input type": ["float"]}}]
    save(tmp_path / "rank0.json", events, baseTimeNanoseconds=10**40)
    found = read(tmp_path / "rank0.json")
    assert (len(found.kernels.launch), [call.num_bytes for call in found.calls]) == (0, [None] * 4)


@pytest.mark.parametrize(
    ("hosts", "alignment", "said"),
    [
        (["a"], Alignment((0,), (0.0,)), "one rank, one clock"),
        (["a", "a"], Alignment((0, 0), (0.0, 0.0)), "one host, one clock"),
        (["a", "b"], Alignment((0, 0), (0.0, 2e6), 3_000_000), "messages arrive up to 3 ms before they are sent"),
        (["a", "b"], Alignment((0, -5_000_000), (0.0, 2e6)), "2 hosts; shifted by up to 5 ms, "),
        (["a", "b"], Alignment((0, -5_000_000), (0.0, 2e6)), "; accurate to 2 ms"),
        (
            ["a", None],
            Alignment((0, 0), (0.0, float("inf"))),
            "hosts unknown; no message contradicts them",
        ),
    ],
)
def test_what_is_known_of_the_clocks_is_told_by_the_worst(hosts: list[Any], alignment: Alignment, said: str) -> None:
    traces: Any = SimpleNamespace(alignment=alignment, members=[SimpleNamespace(host=host) for host in hosts])
    assert said in described(traces)


def test_an_action_runs_from_its_input_to_its_output() -> None:
    ran = LabelledAction(Action.parse("1F0"), 10, 50)
    receive = Action.parse("1RECV_F0")

    def spans(done: int | None, *sends: int) -> tuple[int, int]:
        halves = {receive: MessageEnd(False, 5, 6, 6, done, None)}
        calls = [MessageEnd(True, send, send + 1, send, None, None) for send in sends]
        (found,) = _on_host([ran], halves, calls, 2)
        return found.start, found.end

    assert spans(None) == (10, 50)
    assert spans(30) == (30, 50)
    assert spans(50) == (50, 50)  # as it ended
    assert spans(51) == (10, 50)  # another step's
    assert spans(30, 30, 40, 45) == (30, 40)
    assert spans(30, 50) == (30, 50)


def test_names_of_a_step_are_those_that_begin_in_it_and_hold_no_action() -> None:
    computed = [LabelledAction(Action.parse("0F0"), 20, 30)]
    named = [("before", 5, 9), ("around", 15, 35), ("in it", 22, 25), ("at its end", 60, 70), ("later", 80, 90)]
    recording: Any = SimpleNamespace(others=[Mark(*entry) for entry in named], has_device=False)
    assert [other.name for other in _others(recording, (computed, 10, 60), [])] == ["in it"]  # type: ignore[arg-type]
