"""Stages that are started one by one, as on several hosts: each with its own keeper and its own copy of the export."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drumline.core.errors import LaunchError, UsageError
from drumline.serve.ledger import Ledger
from drumline.serve.logs import EventLog
from drumline.serve.stage_calls import StagePast
from drumline.serve.stages.host import host_stage
from drumline.serve.stages.remote import RemoteStages
from drumline.serve.wire.links import PLAIN, Tls, free_port
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.manifest import read_manifest
from drumline.serve.wire.protocol import SERVICE, InferResponse, message, stub
from drumline.serve.wire.tensors import read_outputs
from refused import refused
from served.certificates import Authority
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
    waiting_for,
    write_served,
)
from some import some

pytestmark = pytest.mark.slow
WIDE, SLOW = 256, 600


def _command(folder: Path, number: int, addresses: list[str], *more: str) -> list[str]:
    command = [sys.executable, "-m", "drumline", "serve", str(folder), "--stage", str(number), *more]
    following = ["--next", addresses[number + 1]] if number + 1 < len(addresses) else []
    return [*command, "--listen", addresses[number], *following]


@contextmanager
def _begun(folder: Path, number: int, addresses: list[str], *more: str) -> Iterator[subprocess.Popen[str]]:
    """Start a stage by its own command."""
    command = _command(folder, number, addresses, *more)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as popen:
        try:
            yield popen
        finally:
            popen.terminate()
            popen.communicate(timeout=60)
    assert popen.returncode == 0


def _ready(popen: subprocess.Popen[str]) -> subprocess.Popen[str]:
    assert popen.stdout is not None
    assert popen.stdout.readline() == "ready\n"
    return popen


@contextmanager
def hosted_stage(folder: Path, number: int, addresses: list[str], *more: str) -> Iterator[subprocess.Popen[str]]:
    """Start a stage; yields it once it is ready."""
    with _begun(folder, number, addresses, *more) as popen:
        yield _ready(popen)


@contextmanager
def hosted(folder: Path, addresses: list[str], *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start all stages at once; yields them once they are ready."""
    with ExitStack() as stack:
        numbers = range(len(addresses))
        yield [*map(_ready, [stack.enter_context(_begun(folder, number, addresses, *more)) for number in numbers])]


def _counts(running: Running, line: str) -> bool:
    return line in metrics_at(running.started.metrics_port)


def _free(count: int = 2) -> list[str]:
    return [f"127.0.0.1:{free_port()}" for _ in range(count)]


def _process(popen: subprocess.Popen[str]) -> int:
    """Return the process of a stage, by what its keeper logs."""
    assert popen.stderr is not None
    for line in popen.stderr:
        if line.startswith("{") and (told := json.loads(line))["event"] == "stage ready":
            return int(told["process"])
    raise AssertionError


def test_stages_started_one_by_one_serve_over_mutual_tls(served_folder: Path, tmp_path: Path) -> None:
    """As on several hosts: each stage by its own command, the front with their addresses."""
    ours = Authority(tmp_path, "ours")
    certificate, key = ours.sign("node")
    tls = ["--tls-cert", certificate, "--tls-key", key, "--tls-ca", ours.path]
    addresses = _free()
    with hosted(served_folder, addresses, *tls):
        with serving(served_folder, hosts=tuple(addresses), tls=Tls(certificate, key, ours.path)) as running:
            x = rows_of(5)
            with grpc.secure_channel(running.address, Tls(certificate, key, ours.path).channel()) as channel:
                np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)
        for address in some(addresses):  # as whoever restarts a stage on another host asks it
            with grpc.secure_channel(address, Tls(certificate, key, ours.path).channel()) as channel:
                told = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
                assert told.status == health_pb2.HealthCheckResponse.SERVING
        swapped = serving(served_folder, hosts=tuple(reversed(addresses)), tls=Tls(certificate, key, ours.path))
        with refused(LaunchError, r"is stage \d of 2 of tanh,", expected=r"stage \d of 2 of tanh"), swapped:
            pass


def test_a_stage_that_is_killed_on_its_host_comes_back_from_its_copy_and_is_counted(tmp_path: Path) -> None:
    folder, other, addresses = write_served(tmp_path / "tanh"), write_served(tmp_path / "other", repeat=3), _free()
    with hosted(folder, addresses) as stages, serving(folder, hosts=tuple(addresses)) as running:
        x = rows_of(3)
        for path in other.rglob("*.*"):
            (folder / path.relative_to(other)).write_bytes(path.read_bytes())
        for popen in stages:
            os.kill(_process(popen), signal.SIGKILL)
        with channel_to(running.address) as channel:
            np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)
        for number in range(2):
            line = f'drumline_stage_restarts_total{{stage="{number}"}} 1.0'
            waiting_for(partial(_counts, running, line))


def test_a_stage_of_another_export_on_a_host_is_not_used_and_requests_wait_for_the_right_one(tmp_path: Path) -> None:
    folder, other, addresses = write_served(tmp_path / "tanh"), write_served(tmp_path / "other", repeat=3), _free()
    x = rows_of(3)
    with (
        hosted(folder, addresses) as (_, right),
        serving(folder, hosts=tuple(addresses)) as running,
        channel_to(running.address) as channel,
    ):
        np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)
        right.terminate()
        right.wait()
        with hosted_stage(other, 1, addresses):
            waiting_for(lambda: running.started.stages.down == [1])
            request = request_of({"x": x})
            request.parameters["timeout"].int64_param = 500_000
            code, why = status_of(lambda: stub(channel, "ModelInfer")(request, timeout=60))
            assert (code, why) == (
                grpc.StatusCode.DEADLINE_EXCEEDED,
                "no answer within 0.5 seconds; stage 1 does not answer",
            )
            assert not stub(channel, "ServerReady")(message("ServerReadyRequest")(), timeout=60).ready
        with hosted_stage(folder, 1, addresses):
            np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)


def test_what_a_stage_on_a_host_computed_when_it_was_killed_is_not_repeated_and_the_rest_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, addresses = write_served(tmp_path / "tanh", num_stages=1, width=WIDE, repeat=SLOW), _free(1)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with (
        hosted(folder, addresses) as (popen,),
        serving(folder, hosts=tuple(addresses), rows=4096, window=2) as running,
        channel_to(running.address) as channel,
    ):
        (path,) = tmp_path.glob("drumline-*/ledger0")
        infer, ledger = channel.unary_unary(f"/{SERVICE}/ModelInfer"), Ledger(path)
        long, short = rows_of(4096, width=WIDE), rows_of(1, width=WIDE)
        inside = infer.future(request_of({"x": long}).SerializeToString(), timeout=120)
        waiting_for(lambda: ledger.read().names)
        waits = infer.future(request_of({"x": short}).SerializeToString(), timeout=120)
        os.kill(_process(popen), signal.SIGKILL)
        said = "stage 0: it ended with code -9, at work on this"
        assert status_of(inside.result) == (grpc.StatusCode.UNAVAILABLE, said)
        (y,) = read_outputs(InferResponse.FromString(waits.result())).values()
        np.testing.assert_allclose(y, expected(short, num_stages=1, repeat=SLOW), atol=1e-4)


def _state(how: str = "", *, seconds: float = 1e9, at_work: bool = False) -> dict[str, Any]:
    return {"seconds": seconds, "at_work": at_work, "how": how}


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([_state(), _state()], ""),
        ([_state(), _state("it ended")], "it ended"),
        ([_state(), _state(seconds=0.0)], "may have been"),
        ([_state(), {}], "may have been"),
        ([_state(at_work=True), _state()], "may have been"),
    ],
)
def test_a_lost_microbatch_is_sent_again_only_if_every_stage_knows_that_it_may(
    served_folder: Path, states: list[dict[str, Any]], said: str
) -> None:
    """The third: a keeper that is younger than the microbatch. The last: one is at work on it until time is over."""

    async def run() -> str:
        stages = RemoteStages(["a:1", "b:1"], read_manifest(served_folder), tls=PLAIN, log=EventLog())

        async def state(body: bytes, **more: Any) -> bytes:
            return json.dumps(next(turns)).encode()

        turns = cycle(states)
        stages._states = {0: state, 1: state}
        return await stages.struck("seven", 1, seconds=0.2, asked=time.monotonic() - 5.0)

    found = run_to_end(run())
    assert said in found
    assert bool(said) == bool(found)


def test_a_stage_knows_how_it_ended_before() -> None:
    ledger, past = Ledger(), StagePast(struck=[("six", "it ended")])
    with ledger.computing("seven"):
        states = [past.state_of(name, ledger) for name in ("six", "seven", "eight")]
    assert [(state["at_work"], state["how"]) for state in states] == [(False, "it ended"), (True, ""), (False, "")]


def test_a_stage_on_a_host_that_there_is_none_of_is_refused(served_folder: Path) -> None:
    started = host_stage(served_folder, 2, "127.0.0.1:0", "", tls=PLAIN, threads=1, limit=2, max_bytes=2**20)
    with refused(UsageError, "there is no stage 2", expected="a number below 2"):
        run_to_end(started)
