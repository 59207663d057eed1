"""What front and stages exchange: calls over a stream, a stage's answer, and microbatches into the pipe."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from drumline.serve.front.answer_sizes import AnswerSizes
from drumline.serve.front.service import FrontService
from drumline.serve.front.tickets import signature_of
from drumline.serve.logs import EventLog
from drumline.serve.session import Session
from drumline.serve.stage_calls import StageService
from drumline.serve.stages.hang import HangWatch
from drumline.serve.wire.flow import CallStream
from drumline.serve.wire.flows import Answering, Flows, Home
from drumline.serve.wire.frames import EXPORT, SERVICE, Answer, Failed, Frame, FrameKind, Lost
from drumline.serve.wire.links import PLAIN, connect, options
from drumline.serve.wire.loops import run_to_end
from drumline.serve.wire.manifest import read_manifest
from drumline.serve.wire.protocol import InferResponse
from drumline.serve.wire.stage_times import StageTimes, times_of
from drumline.serve.wire.tensors import read_outputs
from served.carried import EXPORTED, LIMIT, Carried, Code, failure, until
from served.services import expected, request_of, rows_of
from some import some

Left = Callable[[], None] | None
NAMED = ((EXPORT, EXPORTED),)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"short", "a frame of 5 bytes"),
        (bytes(Frame(FrameKind.CALL, 1, float("nan"))), "a frame with nan seconds"),
        (bytes(Frame(FrameKind.CALL, 1, float("inf"))), "a frame with inf seconds"),
        (bytes(Frame(FrameKind.FAIL, 1, 3, "why"))[:-1], "a frame whose text has 3 bytes, of 2 behind its head"),
        (b"\x09" + bytes(Frame(FrameKind.CALL, 1))[1:], "9 is not a valid FrameKind"),
    ],
)
def test_a_damaged_frame_is_told(data: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Frame.parse(data)


async def _server(answer: Answering, address: str) -> tuple[Any, str]:
    server = grpc.aio.server(options=options(LIMIT))
    server.add_generic_rpc_handlers((Flows(answer, export=EXPORTED, max_bytes=LIMIT).handlers(),))
    port = server.add_insecure_port(address)
    await server.start()
    return server, f"127.0.0.1:{port}"


@asynccontextmanager
async def joined(answer: Answering) -> AsyncIterator[tuple[CallStream, Any, str]]:
    """A caller and a stage in one loop."""
    server, address = await _server(answer, "127.0.0.1:0")
    async with connect(address, PLAIN, LIMIT) as channel:
        flow = CallStream(channel, stage=1, export=EXPORTED, max_bytes=LIMIT)
        try:
            yield flow, server, address
        finally:
            await flow.close()
            await server.stop(None)


def test_every_call_gets_its_own_answer_in_whatever_order_they_come() -> None:
    turns = [asyncio.Event() for _ in range(9)]

    async def answer(body: bytes, seconds: float, left: Left, home: Home) -> Answer:
        number = int(body)
        if left is not None:
            left()
        if number == 3:
            home(Answer(b"answer 3", "times 3"))
            raise RuntimeError("what comes after the answer does not count")
        await turns[number].wait()  # the last one first
        turns[number - 1].set()
        return Answer(b"answer %d" % number, f"times {number}")

    async def run() -> None:
        turns[-1].set()
        turns[2].set()
        told: list[int] = []
        async with joined(answer) as (flow, _, _):
            calls = [
                flow(b"%d" % number, timeout=60, left=partial(told.append, number) if number % 2 else None)
                for number in range(9)
            ]
            found = await asyncio.gather(*calls)
        for number, item in some(list(enumerate(found))):
            assert (item.body, item.times) == (b"answer %d" % number, f"times {number}")
        assert told == [1, 3, 5, 7]

    run_to_end(run())


def test_a_caller_that_asks_for_nothing_more_gets_its_answers_and_the_end() -> None:
    async def answer(body: bytes, seconds: float, left: Left, home: Home) -> Answer:
        await asyncio.sleep(0 if body == b"at once" else 0.05)
        if body == b"at once":
            home(Answer(body))  # and then it is returned: the caller gets it once
        return Answer(body)

    async def function(channel: Any, *frames: bytes) -> tuple[list[bytes], grpc.StatusCode]:
        stream = channel.stream_stream(f"/{SERVICE}/Flow")(iter(frames), timeout=20, metadata=NAMED)
        found: list[bytes] = []
        with suppress(grpc.aio.AioRpcError):  # its code says how it ended
            found.extend([Frame.parse(data).body async for data in stream])
        return sorted(found), await stream.code()

    async def run() -> None:
        async with joined(answer) as (_, _, address), connect(address, PLAIN, LIMIT) as channel:
            late, soon = (
                bytes(Frame(FrameKind.CALL, at, 9.0, body=body)) for at, body in enumerate((b"late", b"at once"))
            )
            assert await function(channel, late, soon) == ([b"at once", b"late"], Code.OK)
            # Answers are being written when the streams end, or when they turn out to be damaged.
            every = await asyncio.gather(*(function(channel, soon) for _ in range(100)))
            assert every == [([b"at once"], Code.OK)] * 100
            damaged = await asyncio.gather(*(function(channel, soon, b"garbage") for _ in range(100)))
            assert {code for _, code in damaged} == {Code.INVALID_ARGUMENT}

    run_to_end(run())


def test_a_cancelled_call_and_a_passed_deadline_end_the_work_of_the_stage() -> None:
    begun, stopped, remaining = [], [], []

    async def answer(body: bytes, seconds: float, left: Left, home: Home) -> Answer:
        begun.append(body)
        remaining.append(seconds)
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            stopped.append(body)
            raise
        raise AssertionError

    async def run() -> None:
        async with joined(answer) as (flow, _, _):
            gone = flow(b"gone", timeout=60)
            await until(lambda: begun == [b"gone"])
            gone.cancel()
            await until(lambda: stopped == [b"gone"])
            crossed = flow(b"fine", timeout=60)
            crossed.cancel()
            flow._take(Frame(FrameKind.DONE, 1))  # an answer that comes while its call is being given up
            late = flow(b"late", timeout=0.3)
            assert await failure(late) == (Code.DEADLINE_EXCEEDED, "stage 1: no answer in time")
            await until(lambda: stopped == begun)
        assert remaining == sorted(remaining, reverse=True)
        assert 0 < remaining[-1] <= 60

    run_to_end(run())


def test_calls_inside_a_stage_that_dies_fail_and_others_wait_for_the_next_one() -> None:
    begun = []

    async def hangs(body: bytes, seconds: float, left: Left, home: Home) -> Answer:
        begun.append(body)
        await asyncio.sleep(600)
        raise AssertionError

    async def answers(body: bytes, seconds: float, left: Left, home: Home) -> Answer:
        return Answer(body)

    async def run() -> None:
        async with joined(hangs) as (flow, server, address):
            inside = flow(b"inside", timeout=60)
            await until(lambda: bool(begun))
            await server.stop(None)
            with pytest.raises(Lost, match="stage 1: ") as caught:
                await inside
            assert (caught.value.code, caught.value.stage) == (Code.UNAVAILABLE, 1)
            outside = flow(b"outside", timeout=60)
            flow._broke(Code.UNAVAILABLE, "gone")
            await asyncio.sleep(0.1)
            assert not outside.done()
            refused = flow(b"refused", timeout=60)
            flow._end(max(flow._calls), Code.UNIMPLEMENTED, "no such call")
            assert (await failure(refused))[0] is Code.UNIMPLEMENTED
            again, _ = await _server(answers, address)
            assert (await outside).body == b"outside"
            await flow.close()
            await again.stop(None)

    run_to_end(run())


def test_a_message_that_is_too_large_fails_alone() -> None:
    async def answer(body: bytes, seconds: float, left: Left, home: Home) -> Answer:
        return Answer(body * 2)

    async def run() -> None:
        async with joined(answer) as (flow, _, address):
            small = flow(b"small", timeout=60)
            code, why = await failure(flow(b"x" * LIMIT, timeout=60))
            assert code is Code.RESOURCE_EXHAUSTED
            assert f"{LIMIT} are allowed" in why
            code, why = await failure(flow(b"x" * (LIMIT // 2), timeout=60))
            assert (code, why.startswith("stage 1: an answer of")) == (Code.RESOURCE_EXHAUSTED, True)
            assert (await small).body == b"smallsmall"
            async with connect(address, PLAIN, LIMIT) as channel:
                stream = channel.stream_stream(f"/{SERVICE}/Flow")(metadata=NAMED)
                await stream.write(b"junk")
                assert await stream.code() is Code.INVALID_ARGUMENT

    run_to_end(run())


class Behind:
    """The next stage, as a stage sees it."""

    def __init__(self) -> None:
        self.timeouts: list[float] = []
        self.answer = Answer(b"from behind", "1,5,6,7,8,9,10")

    def __call__(self, body: bytes, *, timeout: float, done: Home | None) -> asyncio.Future[Answer]:
        self.timeouts.append(timeout)
        made = asyncio.get_running_loop().create_future()
        if done is not None:
            done(self.answer)
        made.set_result(self.answer)
        return made


def test_a_stage_hands_on_deadlines_and_times_and_refuses_what_it_should(served_folder: Path) -> None:
    async def run() -> None:
        manifest, behind, told = read_manifest(served_folder), Behind(), []
        first: Any = StageService(manifest, 0, Session(served_folder, manifest, 0), following=behind, limit=2)  # type: ignore[arg-type]
        last = StageService(manifest, 1, Session(served_folder, manifest, 1), limit=2)
        body, x = request_of({"x": rows_of(2)}).SerializeToString(), rows_of(2)
        found = await first.answer(body, 7.0, lambda: told.append("left"))
        assert found.body == b"from behind"
        assert [time.stage for time in times_of(found.times)] == [0, 1]
        assert 0 < behind.timeouts[0] < 7.0
        assert told == ["left"]
        middle = await first.answer(body, 7.0, alone=True)
        assert len(behind.timeouts) == 1
        (arrays,) = [read_outputs(InferResponse.FromString(middle.body))]
        ended = await last.answer(request_of(arrays).SerializeToString(), 7.0)
        (y,) = read_outputs(InferResponse.FromString(ended.body)).values()
        np.testing.assert_allclose(y, expected(x), atol=1e-6)
        assert (await failure(first.answer(body, -1.0)))[0] is Code.DEADLINE_EXCEEDED
        assert await failure(first.answer(b"\xff\xff", 7.0)) == (
            Code.INVALID_ARGUMENT,
            "stage 0: the message is no request",
        )
        codes = await asyncio.gather(*(first.answer(body, 7.0) for _ in range(3)), return_exceptions=True)
        assert [code.code for code in codes if isinstance(code, Failed)] == [Code.RESOURCE_EXHAUSTED]
        await first.drained(1.0)
        assert (await failure(first.answer(body, 7.0)))[0] is Code.UNAVAILABLE

    run_to_end(run())


def test_a_request_enters_an_idle_pipe_at_once_and_a_full_one_not_at_all() -> None:
    async def run() -> None:
        carried = Carried(max_wait=600.0, rows=8)
        ticket = carried.send(rows_of(1))
        carried.pipe.poke()
        async with asyncio.timeout(60):
            np.testing.assert_array_equal((await ticket.answer)["y"], 2 * rows_of(1))
        full = Carried(holds=True, rows=1, window=3)
        for seed in range(6):
            full.send(rows_of(1, seed))
        full.pipe.poke()
        await asyncio.sleep(0.1)
        assert len(full.calls) == full.pipe.in_pipe == 3
        await full.pipe.close()

    run_to_end(run())


@pytest.mark.parametrize(("seconds", "window"), [(0.051, 2), (0.04, 3)])
def test_the_window_follows_what_microbatches_spent_in_the_pipe(seconds: float, window: int) -> None:
    """Each stage computes 12 ms; the rest passes between their computations."""

    async def run() -> None:
        ends = [0.012, seconds]
        times = [StageTimes(at, 0, int((end - 0.012) * 1e9), int(end * 1e9), 0, 1, 1) for at, end in enumerate(ends)]
        carried = Carried(times=";".join(map(str, times)))
        for seed in range(10):
            await _answered_alone(carried, rows_of(1, seed))
        assert carried.tuner.window(signature_of({"x": rows_of(1)})) == window

    run_to_end(run())


async def _answered_alone(carried: Carried, x: Any) -> None:
    ticket = carried.send(x)
    carried.pipe.poke()
    await ticket.answer
    await until(lambda: carried.pipe.in_pipe == 0)


def test_lost_microbatches_are_sent_again_as_often_as_allowed_and_counted() -> None:
    async def run() -> None:
        lost = Failed(Code.UNAVAILABLE, "stage 1: gone")
        again = Carried([lost], retries=1)
        ticket = again.send(rows_of(1))
        again.pipe.poke()
        np.testing.assert_array_equal((await ticket.answer)["y"], 2 * rows_of(1))
        assert len(again.calls) == 2
        assert again.metrics.registry.get_sample_value("drumline_retries_total") == 1
        twice = Carried([lost, lost], retries=1)
        ticket = twice.send(rows_of(1))
        twice.pipe.poke()
        assert await failure(ticket.answer) == (Code.UNAVAILABLE, "stage 1: gone")
        assert len(twice.calls) == 2

    run_to_end(run())


def test_a_microbatch_that_a_stage_computed_when_it_ended_is_not_sent_again() -> None:
    async def run() -> None:
        lost = Lost(1, "stage 1: the connection broke")
        guilty = Carried([lost], retries=1, why="stage 1: it ended at work on this")
        ticket = guilty.send(rows_of(1))
        guilty.pipe.poke()
        assert await failure(ticket.answer) == (Code.UNAVAILABLE, "stage 1: it ended at work on this")
        assert (len(guilty.calls), guilty.asked) == (1, [("0", 1)])
        assert guilty.metrics.registry.get_sample_value("drumline_retries_total") == 0
        spared = Carried([lost, lost], retries=1)
        ticket = spared.send(rows_of(1))
        spared.pipe.poke()
        assert await failure(ticket.answer) == (Code.UNAVAILABLE, "stage 1: the connection broke")
        assert (len(spared.calls), spared.asked) == (2, [("0", 1)])
        never = Carried([lost], retries=0)
        ticket = never.send(rows_of(1))
        never.pipe.poke()
        assert await failure(ticket.answer) == (Code.UNAVAILABLE, "stage 1: the connection broke")
        assert len(never.calls) == 1

    run_to_end(run())


def test_a_lost_microbatch_is_sent_again_without_the_rows_of_a_request_that_has_failed() -> None:
    """Other rows of that request were inside the stage when it ended, and may be why."""

    async def run() -> None:
        carried = Carried([Lost(1, "gone")], retries=1, rows=8)
        first, second = carried.send(rows_of(2, 1)), carried.send(rows_of(3, 2))
        carried.pipe.poke()
        first.fail(Failed(Code.UNAVAILABLE, "gone"))
        np.testing.assert_array_equal((await second.answer)["y"], 2 * rows_of(3, 2))
        assert [len(x) for x in carried.calls] == [5, 3]

    run_to_end(run())


class Blocked:
    """A computation that ends when it may, and does not react to `stop`."""

    threads = 1

    def __init__(self) -> None:
        self.may_end, self.has_begun = threading.Event(), threading.Event()

    def begin(self, arrays: Any) -> Any:
        return self

    def __call__(self) -> dict[str, Any]:
        self.has_begun.set()
        assert self.may_end.wait(60)
        return {}

    def stop(self) -> None:
        pass


def test_a_ledger_knows_what_is_computed_and_whether_anybody_waits_for_it(served_folder: Path) -> None:
    async def looked(service: StageService, watch: HangWatch) -> str:
        async with asyncio.timeout(60):
            while True:
                service.ledger.beat(service.worked())
                if why := watch.look(service.ledger.read()):
                    return why
                await asyncio.sleep(0.001)

    async def run() -> None:
        blocked: Any = Blocked()
        service = StageService(read_manifest(served_folder), 1, blocked, limit=2)
        body = request_of({"h1": rows_of(2)}, name="seven").SerializeToString()
        call = asyncio.ensure_future(service.answer(body, 60.0))
        await until(blocked.has_begun.is_set)
        state = service.ledger.read()
        assert (state.names, state.unwanted) == (("seven",), 0)
        ticks = count()
        assert (
            await looked(service, HangWatch(4.0, lambda: next(ticks)))
            == "it computes, and uses no processor time for 4 s"
        )
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        state = service.ledger.read()
        assert state.unwanted == state.computing > 0
        blocked.may_end.set()
        await until(lambda: service.ledger.read().names == ())

    run_to_end(run())


@pytest.mark.parametrize("refusal", [Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED])
def test_a_request_that_cannot_be_computed_fails_alone(refusal: grpc.StatusCode) -> None:
    async def run() -> None:
        carried = Carried(rows=8, refusal=refusal)
        bad = np.full((1, 8), np.nan, np.float32)
        tickets = [carried.send(x) for x in (rows_of(2, 1), bad, rows_of(3, 2))]
        carried.pipe.poke()
        np.testing.assert_array_equal((await tickets[0].answer)["y"], 2 * rows_of(2, 1))
        assert (await failure(tickets[1].answer))[0] is refusal
        np.testing.assert_array_equal((await tickets[2].answer)["y"], 2 * rows_of(3, 2))
        assert [len(x) for x in carried.calls] == [6, 2, 1, 3]

    run_to_end(run())


def test_a_service_that_stops_takes_no_more_requests(served_folder: Path) -> None:
    async def run() -> None:
        carried: Any = Carried()
        manifest = read_manifest(served_folder)
        sizes = AnswerSizes(manifest, LIMIT)
        front = FrontService(
            manifest, carried.pipe, carried, carried.metrics, EventLog(), sizes=sizes, max_rows=9, timeout=60.0
        )
        front.is_draining = True
        assert await failure(front._infer(request_of({"x": rows_of(1)}), None, "r")) == (
            Code.UNAVAILABLE,
            "the service is stopping",
        )

    run_to_end(run())
