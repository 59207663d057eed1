"""The parts of a service by themselves: how batches are cut, what queues admit, what manifests and graphs are."""

from __future__ import annotations

import asyncio
import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from drumline.core.errors import RecordError, UsageError
from drumline.core.measured.run import read_run
from drumline.core.timeline.idle import Cause
from drumline.report.run.page import run_page
from drumline.report.run.report import report_of
from drumline.serve.export.onnx_graph import BoundaryValue, Graph
from drumline.serve.front.lifecycle import ServiceSettings, serve
from drumline.serve.front.queue import Queue
from drumline.serve.front.record import LoadRecord, check_record
from drumline.serve.front.tickets import Ticket
from drumline.serve.front.tuner import Tuner
from drumline.serve.ledger import LedgerState
from drumline.serve.load.generator import Demand, Loader
from drumline.serve.session import open_session
from drumline.serve.stages.hang import HangWatch
from drumline.serve.wire.files import check_files
from drumline.serve.wire.frames import Failed
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.manifest import Tensor, read_manifest
from drumline.serve.wire.protocol import InferRequest, InferResponse
from drumline.serve.wire.stage_times import StageTimes
from drumline.serve.wire.tensors import Arrays, Refused, put_outputs, read_inputs, read_outputs
from refused import refused, saying
from served.services import rows_of, write_served
from some import some

MS = 1_000_000


def ticket(rows: int, loop: asyncio.AbstractEventLoop, seed: int = 0, timeout: float = 60.0) -> Ticket:
    return Ticket(f"r{seed}", {"x": rows_of(rows, seed)}, timeout=timeout, loop=loop)


def test_rows_of_many_requests_travel_together_and_come_back_to_their_own() -> None:
    loop = asyncio.new_event_loop()
    tickets = [ticket(rows, loop, seed) for seed, rows in enumerate((3, 1, 4, 2))]
    queue = Queue(max_requests=9, max_bytes=10**6)
    for item in tickets:
        queue.admit(item)
    taken = []
    while (microbatch := queue.take(tickets[0].signature, 3)) is not None:
        taken.append(microbatch)
    assert [sent.rows for sent in taken] == [3, 3, 3, 1]
    assert len(queue) == 0
    for microbatch in reversed(taken):  # in whatever order answers come
        microbatch.put({"y": microbatch.inputs()["x"] * 2})
    for item in tickets:
        np.testing.assert_array_equal(item.answer.result()["y"], item.inputs["x"] * 2)
    loop.close()


def test_a_queue_admits_no_more_requests_or_bytes_than_it_may() -> None:
    loop = asyncio.new_event_loop()
    queue = Queue(max_requests=2, max_bytes=300)
    queue.admit(ticket(4, loop))
    with pytest.raises(
        Failed, match="RESOURCE_EXHAUSTED: requests and answers have 128 bytes already, 300 are allowed"
    ):
        queue.admit(ticket(8, loop))
    second = ticket(4, loop)
    queue.admit(second)
    with pytest.raises(Failed, match="RESOURCE_EXHAUSTED: 2 requests wait already"):
        queue.admit(ticket(1, loop))
    with pytest.raises(Failed, match="it has 320 bytes with its answer, 300 are allowed; send fewer rows"):
        Queue(max_requests=2, max_bytes=300).admit(ticket(10, loop))
    queue.drop(second)
    third = ticket(1, loop)
    queue.admit(third)
    assert len(queue) == 2
    queue.clear(lambda: Failed(grpc.StatusCode.UNAVAILABLE, "over"))
    assert (len(queue), queue.bytes) == (0, 288)
    for item in (second, third, third):
        queue.release(item)
    assert queue.bytes == 128
    loop.close()


def test_requests_that_are_over_are_not_sent() -> None:
    loop = asyncio.new_event_loop()
    queue = Queue(max_requests=9, max_bytes=10**6)
    late, fine = ticket(3, loop, timeout=-1.0), ticket(2, loop)
    for item in (late, fine):
        queue.admit(item)
    assert queue.oldest() is fine
    microbatch = queue.take(fine.signature, 8)
    assert microbatch is not None
    assert [part.ticket for part in microbatch.slices] == [fine]
    loop.close()


def test_microbatches_keep_within_the_budget_whatever_rows_take() -> None:
    for each in (0.001, 0.004, 0.012, 0.2):
        tuner = Tuner(2, budget=0.05, max_rows=64)
        for rows in (1, 2, 3):
            tuner.add((), rows, [0.001 + each * rows, 0.8 * each * rows])
        most, window = tuner.most_rows(()), tuner.window(())
        assert 2 <= window <= 4
        assert most == 1 or window * (0.001 + each * most) <= 0.85 * 0.05 + 1e-9
        sizes = tuner.sizes((), 17, behind=True)
        assert sum(sizes) == 17
        assert max(sizes) <= most


@pytest.mark.parametrize(("seconds", "window"), [(0.0106, 4), (0.0107, 3), (0.0141, 3), (0.0143, 2), (0.2, 2)])
def test_what_waits_in_the_pipe_leaves_room_in_the_budget(seconds: float, window: int) -> None:
    tuner = Tuner(2, budget=0.05, max_rows=64)
    tuner.add((), 1, [seconds, seconds / 2])
    assert (tuner.most_rows(()), tuner.window(())) == (1, window)


@pytest.mark.parametrize(("late", "window"), [(50, 2), (200, 3)])
def test_a_pipe_takes_fewer_microbatches_if_more_than_one_of_a_hundred_is_late(late: int, window: int) -> None:
    """Stages take 12 ms on average, and one of so many microbatches spends more than the budget in the pipe."""
    tuner = Tuner(2, budget=0.05, max_rows=64)
    for shape in ((), (("x", (8,)),)):
        tuner.add(shape, 1, [0.012, 0.012])
    for number in range(1000):
        tuner.add((), 1, [0.012, 0.012], inside=0.051 if number % late == 0 else 0.047)
    assert (tuner.window(()), tuner.window((("x", (8,)),))) == (window, 3)
    for _ in range(1000):
        tuner.add((), 1, [0.012, 0.012], inside=0.04)
    assert tuner.window(()) == 3


def test_a_batch_alone_is_cut_finer_than_one_with_others_behind_it() -> None:
    tuner = Tuner(2, budget=1.0, max_rows=64)
    for rows in (1, 2, 3):
        tuner.add((), rows, [0.001 * rows, 0.001 * rows], hop=0.0001)
    assert len(tuner.sizes((), 16, behind=False)) > len(tuner.sizes((), 16, behind=True)) == 1


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["format"], "other", saying("format is 'other'", expected='"drumline-serving"')),
        (["stages"], [], saying(r"stages is \[\]", expected="at least one stage")),
        (["stages", 1, "inputs", 0, "name"], "z", saying("the inputs of stage 1 are not what comes before them")),
        (["inputs", 0, "datatype"], "FP7", saying(r"inputs\[0\].datatype is 'FP7'")),
        (
            ["stages", 0, "file"],
            "../../etc/passwd",
            saying(r"stages\[0\].file is", expected="one of the stage's files"),
        ),
        (["stages", 0, "files"], {"../x": {"bytes": 1, "sha256": ""}}, saying(expected="files inside the folder")),
        (["dimensions", "batch"], {"least": 1}, saying("'dimensions.batch.most' is missing")),
    ],
)
def test_a_damaged_manifest_is_refused_where_it_is_damaged(
    tmp_path: Path, path: list[str | int], value: object, said: dict[str, str]
) -> None:
    folder = write_served(tmp_path / "tanh")
    table = json.loads((folder / "manifest.json").read_text())
    inside = table
    for step in path[:-1]:
        inside = inside[step]
    inside[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(table))
    with refused(RecordError, **said):
        read_manifest(folder)


def test_files_are_held_against_their_checksums(tmp_path: Path) -> None:
    folder = write_served(tmp_path / "tanh")
    manifest = read_manifest(folder)
    assert check_files(folder, manifest, 1) == folder / "stage1" / "model.onnx"
    (folder / "stage1" / "model.onnx").write_bytes(b"torn")
    with refused(RecordError, "damaged: it has 4 bytes"):
        check_files(folder, manifest, 1)


def test_a_graph_cut_anywhere_computes_the_same(tmp_path: Path) -> None:
    """The input is used by the last node too, so it passes through every stage."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("Add", ["b", "a"], ["c"]),
        helper.make_node("Mul", ["c", "x"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 8]) for name in ("x", "y")]
    weight = numpy_helper.from_array(rows_of(8, seed=3), "w")
    model = helper.make_model(helper.make_graph(nodes, "g", [ends[0]], [ends[1]], [weight]),
                              opset_imports=[helper.make_opsetid("", 18)])  # fmt: skip
    model.ir_version = 10
    onnx.save(model, str(tmp_path / "whole.onnx"))
    x = rows_of(3)
    (right,) = open_session(tmp_path / "whole.onnx").run(None, {"x": x})
    graph = Graph(tmp_path / "whole.onnx")
    assert graph.crossing(2) == ["x", "a", "b"]
    for at in range(1, 4):
        middle = [BoundaryValue(name, f"s1.{name}") for name in graph.crossing(at)]
        tensors = {name: Tensor(name, "FP32", ("batch", 8)) for name in ("x", "y", *(value.name for value in middle))}
        first, second = tmp_path / f"{at}" / "first" / "model.onnx", tmp_path / f"{at}" / "second" / "model.onnx"
        graph.write(0, at, [BoundaryValue("x", "x")], middle, tensors, first)
        graph.write(at, 4, middle, [BoundaryValue("y", "y")], tensors, second)
        names = [boundary_value.name for boundary_value in middle]
        made = open_session(first).run(names, {"x": x})
        (found,) = open_session(second).run(None, dict(zip(names, made, strict=True)))
        np.testing.assert_array_equal(found, right)


def recorded(record: LoadRecord, *, count: int, every: int, later: int) -> Path:
    """Record microbatches of 10 ms a stage, one `every` so many ms; the second stage starts so much `later`."""
    for number in range(count):
        starts = [(every * number + later * stage) * MS for stage in (0, 1)]
        record.add([StageTimes(at, s, s, s + 10 * MS, s + 10 * MS, 64, 64) for at, s in enumerate(starts)], 2)
    record.close()
    return record.folder


def test_a_served_load_is_a_run_that_reports_read(tmp_path: Path) -> None:
    """Two stages of 10 ms, the second 1 ms later: no idle time but the first wait of stage 1 and the last of 0."""
    record = LoadRecord(tmp_path / "run", read_manifest(write_served(tmp_path / "tanh")), window=4)
    run = read_run(recorded(record, count=30, every=10, later=11))
    assert run.num_steps == 5
    assert run.timeline(0).bubble == pytest.approx(1 - 80 / (2 * 51))
    report = report_of(run)
    advice = report.figures()["advice"]
    assert (advice["sentence"][:9], advice["remedies"]) == ("no advice", [])
    assert run_page([report]).count("no advice") == 1
    for step in some(run.metrics()):
        assert step["throughput(rows/s)"] == pytest.approx(8 / 0.051)


def test_a_service_that_waits_for_requests_is_idle_for_that_reason(tmp_path: Path) -> None:
    """Stage 0 computes 10 ms of every 15 ms: requests come no faster."""
    record = LoadRecord(tmp_path / "run", read_manifest(write_served(tmp_path / "tanh")), window=4)
    run = read_run(recorded(record, count=14, every=15, later=10))
    timeline = run.timeline(0)
    asked = [cause for cause in timeline.causes if cause.cause is Cause.OUTSIDE]
    assert [(idle.rank, round(idle.seconds, 6)) for idle in asked] == [(0, 0.005)] * 3
    assert "waits for requests" in asked[0].why
    assert not [cause for cause in timeline.causes if cause.cause is Cause.UNEXPLAINED]
    (step,) = [metric for metric in run.metrics() if metric["step"] == 0]
    assert step["pp/rank0/wait_seconds"] == pytest.approx(0.015)
    assert step["pp/rank0/overhead_seconds"] == step["pp/rank0/unexplained_seconds"] == 0


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("served", saying("the exported model itself", fix="choose another folder")),
        ("served/../served", saying("the exported model itself")),
        ("served/run", saying("inside the exported model", fix="choose a folder outside")),
        ("run", saying("already holds a run")),
        ("notes", saying("is not empty", expected="a new folder")),
    ],
)
def test_a_record_mixes_with_no_other_files(tmp_path: Path, place: str, said: dict[str, str]) -> None:
    served = write_served(tmp_path / "served")
    LoadRecord(tmp_path / "run", read_manifest(served)).close()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("mine")
    with refused(UsageError, **said):
        run_to_end(serve(ServiceSettings(served, record=tmp_path / place), notify=lambda started: None))
    for fine in ("new", "empty"):
        check_record(tmp_path / fine, served)
        (tmp_path / "empty").mkdir(exist_ok=True)


def test_a_record_on_a_full_disk_ends_and_harms_no_service(tmp_path: Path) -> None:
    told: list[OSError] = []
    manifest = read_manifest(write_served(tmp_path / "tanh"))
    record = LoadRecord(tmp_path / "run", manifest, window=4, stopped=told.append)
    full = Path("/dev/full")
    if not full.exists():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)("this system has no /dev/full")
    record._files["rank1.jsonl"].close()
    record._files["rank1.jsonl"] = full.open("w", encoding="utf-8")
    recorded(record, count=60, every=10, later=11)
    assert [error.strerror for error in told] == ["No space left on device"]


def test_bools_are_0_or_1_and_outputs_are_all_typed_or_all_raw() -> None:
    request = InferRequest()
    request.inputs.add(name="mask", datatype="BOOL", shape=[3])
    request.raw_input_contents.append(bytes([0, 1, 2]))
    with pytest.raises(Refused, match="input 'mask' has the byte 2; expected 0 or 1"):
        read_inputs(request, [Tensor("mask", "BOOL", ("batch",))], {})
    response = InferResponse()
    outputs: Arrays = {"a": np.ones(2, np.float16), "b": np.arange(2.0, dtype=np.float32)}
    put_outputs(response, outputs, typed=True)  # float16 has no typed contents
    assert len(response.raw_output_contents) == 2
    np.testing.assert_array_equal(read_outputs(response)["b"], outputs["b"])


WORKS, WAITS, UNWANTED = (
    [LedgerState(at, 7 * at, 5) for at in range(90)],
    [LedgerState(at, 0, 5) for at in range(90)],
    [LedgerState(at, 7 * at, 5, 5) for at in range(90)],
)


@pytest.mark.parametrize(
    ("states", "said"),
    [
        (WORKS, ""),  # one computation that takes longer than the bound, and works
        ([LedgerState(at) for at in range(90)], ""),  # idle
        ([LedgerState(at, 0, at + 1) for at in range(90)], ""),  # short computations
        ([LedgerState(7)] * 90, "its event loop has not turned for 30 s"),
        (WAITS, "it computes, and uses no processor time for 30 s"),
        (UNWANTED, "no request waits for what it computes for 30 s"),
        ([LedgerState(at, 7 * at, 6, 5) for at in range(90)], ""),  # the computation before was given up
        (WAITS[:30] + WORKS[30:], ""),
        (UNWANTED[:30] + WORKS[30:], ""),
        ([LedgerState(7)] * 30 + WORKS[30:], ""),
    ],
)
def test_only_a_stage_that_neither_lives_nor_works_nor_is_waited_for_hangs(
    states: list[LedgerState], said: str
) -> None:
    seconds = count()
    watch = HangWatch(30.0, lambda: float(next(seconds)))
    assert watch.every == 1.0
    found = [watch.look(state) for state in states]
    assert next(filter(None, found), "") == said
    assert not any(found[:31])


@pytest.mark.parametrize("state", [LedgerState(7), WAITS[0], UNWANTED[0]])
def test_a_stage_does_not_hang_because_the_machine_stood_still(state: LedgerState) -> None:
    """All processes are frozen again and again, for longer than the bound; a stage moves later than the front."""
    now = 0.0
    watch = HangWatch(1.0, lambda: now)
    for at in range(100):
        now += 2.5
        assert watch.look(state) == ""
        now += watch.every
        assert watch.look(state) == ""
        state = LedgerState(at, at, at + 1, at)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"window": 0}, saying("--window is 0", expected="1 or more", fix="leave it out")),
        ({"rows": 0}, saying("--microbatch-rows is 0", expected="1 or more", fix="leave it out")),
        ({"hang": 0.5}, saying("--hang is 0.5", expected="1 second or more, or 0")),
        ({"hang": -1.0}, saying("--hang is -1", expected="1 second or more")),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, Any], said: dict[str, str]) -> None:
    with refused(UsageError, **said):
        ServiceSettings(Path("served"), **given)
    assert ServiceSettings(Path("served"), hang=0.0).window is None


class _Endless(Loader):
    """Sends nothing, and keeps a loop busy."""

    async def once(self, *_: object) -> None:
        pass


def test_an_open_loop_that_cannot_send_as_fast_as_asked_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.serve.load.generator._MOST_LATE", 0.0)
    result = run_to_end(_Endless("nowhere").opened(1e9, 0.05, Demand()))
    assert result.codes["NOT_SENT"] > 0
