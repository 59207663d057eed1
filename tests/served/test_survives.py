"""What a front survives itself: logs that nobody reads, a system that gives nothing, visitors that say nothing."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drumline.serve.front.metrics import Metrics
from drumline.serve.front.metrics_port import MOST_OPEN, MetricsPort
from drumline.serve.logs import _MOST_LINES, EventLog
from drumline.serve.stages.keeper import StageKeeper
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.protocol import message, stub
from served.carried import until
from served.services import channel_to, expected, inferred, metrics_at, rows_of, serving, waiting_for


def test_a_log_that_nobody_reads_stops_nobody_and_says_later_what_it_left_out() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as file:
        log = EventLog(file)
        for number in range(_MOST_LINES + 5000):  # a pipe holds about 700 of them
            log("request", number=number, why="some words that make the line longer")
        assert log._left_out > 0
        first = json.loads(reader.readline())
        lines = [first]
        while not log._lines.empty():
            lines.append(json.loads(reader.readline()))
        log("after")
        while lines[-1]["event"] != "after":
            lines.append(json.loads(reader.readline()))
        left_out = sum(line.get("lines_left_out", 0) for line in lines)
        assert len(lines) + left_out == _MOST_LINES + 5001
        log.close()


def test_a_log_whose_reader_has_gone_raises_nothing() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as file:
        log = EventLog(file)
        log("one")
        waiting_for(log._lines.empty)
        log("two")
        log.close()
        assert log._thread is not None
        assert not log._thread.is_alive()


class System:
    """Starts no more processes for a while."""

    def __init__(self, start: Callable[..., Any], error: Exception) -> None:
        self.start, self.error = start, error
        self.gives, self.asked = True, 0

    async def __call__(self, *args: Any, **more: Any) -> Any:
        self.asked += 1
        if not self.gives:
            raise self.error
        return await self.start(*args, **more)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files"), RuntimeError("can't start new thread")]
)
def test_a_stage_that_cannot_be_started_is_started_once_it_can_and_until_then_the_service_is_not_alive(
    served_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    system = System(asyncio.create_subprocess_exec, error)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", system)
    monkeypatch.setattr("drumline.serve.stages.keeper._LONGEST_PAUSE", 0.1)
    with serving(served_folder) as running, channel_to(running.address) as channel:
        live, ask = stub(channel, "ServerLive"), message("ServerLiveRequest")()
        assert live(ask, timeout=60).live
        system.gives = False
        os.kill(running.processes[1], signal.SIGKILL)
        waiting_for(lambda: not live(ask, timeout=60).live)
        system.gives = True
        waiting_for(lambda: live(ask, timeout=60).live)
        x = rows_of(2)
        np.testing.assert_allclose(inferred(channel, {"x": x})["y"], expected(x), atol=1e-6)


def test_a_keeper_that_ends_makes_the_service_not_alive(served_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: StageKeeper, process: Any) -> None:
        await process.wait()
        raise KeyError("a mistake of ours")

    with serving(served_folder) as running, channel_to(running.address) as channel:
        live, ask = stub(channel, "ServerLive"), message("ServerLiveRequest")()
        monkeypatch.setattr(StageKeeper, "_started", broken)
        os.kill(running.processes[0], signal.SIGKILL)
        waiting_for(lambda: not live(ask, timeout=60).live)


def _visit(port: int, said: bytes) -> socket.socket:
    visitor = socket.create_connection(("127.0.0.1", port), timeout=60)
    visitor.sendall(said)
    return visitor


def test_visitors_of_the_metrics_port_that_say_nothing_are_few_and_take_no_threads() -> None:
    async def run() -> None:
        port = MetricsPort(Metrics(2).registry, seconds=3600.0)
        number, end = await port.listen("127.0.0.1", 0)
        threads = threading.active_count()
        with ExitStack() as stack:
            for at in range(MOST_OPEN):
                stack.enter_context(_visit(number, b"GET /metrics HTTP/1.1\r\nX: " if at % 2 else b""))
            await until(lambda: port.open == MOST_OPEN)
            for _ in range(300 - MOST_OPEN):
                with _visit(number, b"") as visitor:
                    assert await asyncio.to_thread(visitor.recv, 1) == b""
            assert (port.open, threading.active_count() - threads) <= (MOST_OPEN, 8)  # the test's own threads
        await until(lambda: port.open == 0)
        assert "drumline_bubble" in await asyncio.to_thread(metrics_at, number)
        end()

    run_to_end(run())


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (b"GET /metrics HTTP/1.1\r\nX: ", b"408"),
        (b"", b"408"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 999\r\n\r\nhalf", b"405"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000, b"400"),
    ],
)
def test_a_stalled_head_or_body_is_closed(said: bytes, code: bytes) -> None:
    async def run() -> None:
        port = MetricsPort(Metrics(2).registry, seconds=0.01)
        number, end = await port.listen("127.0.0.1", 0)
        with await asyncio.to_thread(_visit, number, said) as visitor:
            try:
                answer = await asyncio.to_thread(visitor.recv, 100)
            except ConnectionResetError:  # it was closed with bytes unread
                answer = b"HTTP/1.1 400"
            assert answer[9:12] == code
            await until(lambda: port.open == 0)
        end()

    run_to_end(run())
