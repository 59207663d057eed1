"""What a service survives: dead stages, too many requests, clients that go, garbage, wrong certificates, its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from drumline.core.errors import LaunchError, RecordError, UsageError
from drumline.core.measured.run import read_run
from drumline.serve.cores import own_cores
from drumline.serve.wire.frames import EXPORT
from drumline.serve.wire.links import PLAIN, Tls, check_exposed, connect
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.manifest import read_manifest
from drumline.serve.wire.protocol import SERVICE, InferResponse, stub
from drumline.serve.wire.tensors import Array, read_outputs
from matrices import long
from refused import refused
from served.certificates import Authority
from served.fuzzing import garbage_at
from served.services import (
    Running,
    channel_to,
    expected,
    inferred,
    metrics_at,
    request_of,
    rows_of,
    serving,
    status_of,
    threads_of,
    together,
    waiting_for,
    write_served,
)
from serving import first_object
from some import some

pytestmark = pytest.mark.slow
SLOW = 600  # repeats that make a stage take some ten milliseconds
WIDE = 256
CLIENTS = 4


@pytest.fixture(scope="module")
def slow_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("slow") / "tanh", width=WIDE, repeat=SLOW)


def _compare(channel: Any, x: Array) -> None:
    np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-5)


def test_a_killed_stage_comes_back_and_all_requests_but_those_it_computed_are_repeated(served_folder: Path) -> None:
    pin = len(os.sched_getaffinity(0)) > 1
    with serving(served_folder, pin=pin) as running, channel_to(running.address) as first:
        _compare(first, rows_of(2))
        before = running.cores
        codes: list[tuple[grpc.StatusCode, str]] = []
        killed = threading.Event()

        def client(number: int) -> None:
            with channel_to(running.address) as channel:
                for at in range(400):
                    x = rows_of(2, seed=1000 * number + at)
                    codes.append(status_of(partial(_compare, channel, x)))
                    if at == 20 and number == 0:
                        os.kill(running.processes[1], signal.SIGKILL)
                        killed.set()
                    if killed.is_set() and at > 30 and codes[-1][0] is grpc.StatusCode.OK:
                        return

        assert together(CLIENTS, client) == []
        failed = [code for code in codes if code[0] is not grpc.StatusCode.OK]
        assert killed.is_set()
        assert codes[-1][0] is grpc.StatusCode.OK
        said = "stage 1: it ended with code -9, at work on this"
        assert [pair for pair in failed if pair != (grpc.StatusCode.UNAVAILABLE, said)] == []
        assert len(failed) <= CLIENTS  # those of one microbatch
        assert 'drumline_stage_restarts_total{stage="1"} 1.0' in metrics_at(running.started.metrics_port)
        assert running.cores == before  # of its own again
        assert not pin or all(len(group) == 1 for group in before)
        assert not pin or before[0] != before[1]


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_stage_computes_on_its_own_cores_and_reads_messages_on_those_that_are_left(
    served_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = sorted(os.sched_getaffinity(0))
    monkeypatch.setattr("drumline.serve.front.lifecycle.of_messages", lambda left, num_stages: own[:1])
    with serving(served_folder, pin=True) as running, channel_to(running.address) as channel:
        _compare(channel, rows_of(2))
        for number, process in some(enumerate(running.processes)):
            cores = dict(threads_of(process))
            assert cores[process] == set(own[:1])  # the main thread has the number of its process
            assert [group for group in cores.values() if group == {own_cores()[number]}]


@long
def test_a_stage_that_hangs_is_started_again_and_what_it_computed_is_not_repeated(tmp_path: Path) -> None:
    """A request that takes seconds is inside the stage when it stops for ever, another one waits there."""
    folder = write_served(tmp_path / "tanh", num_stages=1, width=WIDE, repeat=SLOW)
    with serving(folder, hang=1.0, rows=4096, window=2) as running, channel_to(running.address) as channel:
        infer, stages = channel.unary_unary(f"/{SERVICE}/ModelInfer"), running.started.stages
        long, short = rows_of(4096, width=WIDE), rows_of(1, width=WIDE)
        inside = infer.future(request_of({"x": long}).SerializeToString(), timeout=60)
        waiting_for(lambda: stages._keepers[0]._ledger.read().names)  # type: ignore[attr-defined]
        waits = infer.future(request_of({"x": short}).SerializeToString(), timeout=60)
        os.kill(running.processes[0], signal.SIGSTOP)
        said = "stage 0: it hung and was ended (its event loop has not turned for 1 s), at work on this"
        assert status_of(inside.result) == (grpc.StatusCode.UNAVAILABLE, said)
        (y,) = read_outputs(InferResponse.FromString(waits.result())).values()
        np.testing.assert_allclose(y, expected(short, num_stages=1, repeat=SLOW), atol=1e-4)


def test_too_many_requests_are_refused_and_the_rest_answered(slow_folder: Path) -> None:
    with serving(slow_folder, max_requests=2, rows=1, window=2) as running:
        codes: list[grpc.StatusCode] = []

        def client(number: int) -> None:
            x = rows_of(2, seed=number, width=WIDE)
            with channel_to(running.address) as channel:
                codes.append(status_of(lambda: inferred(channel, {"x": x}))[0])

        assert together(16, client) == []
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}
        with channel_to(running.address) as channel:
            _check_deadline(channel)
            _check_gone(channel)


def test_more_requests_than_grpc_takes_are_refused_and_none_cancelled(served_folder: Path) -> None:
    """A stage that stands still lets thousands gather in front of the port. gRPC would cancel many beyond 1,000."""

    async def ask(address: str, go_on: Callable[[], None]) -> list[grpc.StatusCode]:
        async with connect(address, PLAIN, 2**20) as channel:
            infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
            body = request_of({"x": rows_of(1)}).SerializeToString()
            calls = [infer(body, timeout=120) for _ in range(2000)]
            refusing = [asyncio.ensure_future(call.code()) for call in calls]
            await asyncio.wait(refusing, return_when=asyncio.FIRST_COMPLETED)
            go_on()
            return await asyncio.gather(*refusing)

    with serving(served_folder, max_requests=2, hang=0) as running:
        process = running.processes[0]
        os.kill(process, signal.SIGSTOP)
        codes = run_to_end(ask(running.address, partial(os.kill, process, signal.SIGCONT)))
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED}


def _check_deadline(channel: Any) -> None:
    """A deadline that passes while stages compute reaches the client as such, and frees the pipe."""
    x = rows_of(60, width=WIDE)
    code, _ = status_of(lambda: inferred(channel, {"x": x}, timeout=0.05))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def _check_gone(channel: Any) -> None:
    """A client that goes away leaves nothing behind: the next one is answered."""
    begun = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
        request_of({"x": rows_of(60, width=WIDE)}).SerializeToString(), timeout=60
    )
    time.sleep(0.05)
    begun.cancel()
    x = rows_of(1, width=WIDE)
    np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x, repeat=SLOW), atol=1e-4)


def test_garbage_at_every_port_harms_nothing(served_folder: Path, running: Running) -> None:
    ports = [running.started.port, running.started.metrics_port]
    processes, exported = running.processes, read_manifest(served_folder)
    for port in some(ports):
        garbage_at(f"127.0.0.1:{port}", cases=25, seed=port)
    for number, address in some(list(enumerate(running.started.stages.addresses))):
        garbage_at(address, cases=25, seed=number, export=exported.handshake(number))
    assert running.processes == processes
    x = rows_of(3)
    with channel_to(running.address) as channel:
        np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)
        for number, address in some(list(enumerate(running.started.stages.addresses))):
            with channel_to(address) as direct:
                infer = partial(stub(direct, "ModelInfer"), request_of({"z": x}), timeout=30)
                code, why = status_of(partial(infer, metadata=((EXPORT, exported.handshake(number)),)))
                assert code is grpc.StatusCode.INVALID_ARGUMENT
                assert "input 'z' is unknown" in why


def test_a_message_over_the_limit_is_refused(served_folder: Path, running: Running) -> None:
    with channel_to(running.address) as channel:
        code, _ = status_of(lambda: inferred(channel, {"x": np.zeros((2**22, 8), np.float32)}))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_mutual_tls_admits_only_certificates_of_its_authority(served_folder: Path, tmp_path: Path) -> None:
    ours, others = Authority(tmp_path, "ours"), Authority(tmp_path, "others")
    server, client, foreign = ours.sign("server"), ours.sign("client"), others.sign("foreign")
    with serving(served_folder, tls=Tls(*server, ours.path)) as running:
        assert [_listening(process) for process in running.processes] == [0, 0]
        x = rows_of(2)

        def tried(tls: Tls) -> grpc.StatusCode:
            with grpc.secure_channel(running.address, tls.channel()) as channel:
                return status_of(lambda: inferred(channel, {"x": x}, timeout=60))[0]

        assert tried(Tls(*client, ours.path)) is grpc.StatusCode.OK
        for tls in (Tls(*foreign, ours.path), Tls(authority=ours.path), Tls(*client, others.path)):
            assert tried(tls) is grpc.StatusCode.UNAVAILABLE
        with channel_to(running.address) as plain:
            assert status_of(lambda: inferred(plain, {"x": x}, timeout=60))[0] is grpc.StatusCode.UNAVAILABLE


def _listening(process: int) -> int:
    """Return on how many ports of TCP a process listens."""
    lines = [Path(f"/proc/{process}/net/{kind}").read_text().splitlines() for kind in ("tcp", "tcp6")]
    fields = [line.split() for table in lines for line in table]
    listening = {f"socket:[{field[9]}]" for field in fields if field[3] == "0A"}
    opened = []
    for path in Path(f"/proc/{process}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed again
            opened.append(os.readlink(path))
    return len(listening.intersection(opened))


def test_only_this_machine_is_served_without_tls() -> None:
    with refused(UsageError, "other machines can reach without TLS"):
        check_exposed("0.0.0.0:8001", Tls(), plain=False, flag="--listen")
    check_exposed("0.0.0.0:8001", Tls(), plain=True, flag="--listen")
    check_exposed("127.0.0.1:8001", Tls(), plain=False, flag="--listen")


@long
def test_sigterm_answers_what_is_under_way_and_leaves_a_timeline(slow_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "drumline", "serve", str(slow_folder), "--listen", "127.0.0.1:0", "--json"]
    command += ["--metrics", "127.0.0.1:0", "--record", str(tmp_path / "run"), "--microbatch-rows", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        started = json.loads(first_object(process.stdout))
        x = rows_of(60, width=WIDE)
        with channel_to(started["address"]) as channel:
            begun = channel.unary_unary(f"/{SERVICE}/ModelInfer").future(
                request_of({"x": x}).SerializeToString(), timeout=100
            )
            while "drumline_pipe_microbatches 0.0" in metrics_at(started["metrics_port"]):
                time.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            assert len(begun.result(100)) > x.nbytes
        assert process.wait(60) == 0
        assert process.stderr is not None
        told = [json.loads(line) for line in process.stderr.read().splitlines()]
    assert [report["event"] for report in told][-2:] == ["draining", "stopped"]
    assert told[-1]["drained"]
    run = read_run(tmp_path / "run")
    assert run.has_ended
    assert run.num_steps >= 1
    assert 0 <= run.timeline().bubble < 1


def test_damaged_files_and_ports_in_use_are_refused_before_anything_is_served(
    served_folder: Path, tmp_path: Path
) -> None:
    folder = write_served(tmp_path / "tanh")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with refused(UsageError, "cannot listen on"), serving(served_folder, listen=address):
            pass
        with refused(UsageError, "cannot serve metrics on"), serving(served_folder, metrics=address):
            pass
    graph = folder / "stage1" / "model.onnx"
    graph.write_bytes(graph.read_bytes()[:-1] + b"!")
    with refused(LaunchError, "stage 1 ended with code 2 before it was ready"), serving(folder):
        pass
    (folder / "manifest.json").write_text('{"format": "drumline-serving", "version": 99}')
    with refused(RecordError, "version is 99"), serving(folder):
        pass
