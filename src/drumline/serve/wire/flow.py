"""Calls over one gRPC stream that stays open: what front and stages exchange.

In Python a unary call of gRPC takes about 2.5 times as long as a message on an open stream and its answer. So the front
keeps a stream to the first stage, and every stage one to the next:

    caller                                     stage
      ── CALL number, seconds left, body ────►
      ◄── LEFT number ────────────────────────     to a caller that ASKed: the microbatch has left this stage
      ◄── DONE number, times, body ───────────     or FAIL number, code of gRPC, why
      ── CANCEL number ──────────────────────►     nobody waits any more

If a stream breaks, calls that were sent fail with its status, and those that were not wait for the next stream.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count
from typing import Any, NamedTuple

import grpc

SERVICE = "drumline.Stage"
_FLOW = "Flow"
_HEAD = struct.Struct("<BQdI")  # kind, number, seconds left or code, bytes of the text
_PAUSE = 0.05  # seconds before a stream that broke is opened again
_MOST_TEXT = 2000  # characters of an error
_CODES = {one.value[0]: one for one in grpc.StatusCode}
_GONE = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)  # how a stage ends its streams


class Failed(Exception):
    """A request that cannot be answered: gRPC's code, and why."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        self.code, self.why = code, why
        super().__init__(f"{code.name}: {why}")


class Kind(IntEnum):
    """What a frame is."""

    CALL, ASK, CANCEL, LEFT, DONE, FAIL = range(6)


class Frame(NamedTuple):
    """A message of the stream.

    >>> Frame.parse(bytes(Frame(Kind.FAIL, 7, 3, "why", b"body")))
    Frame(kind=<Kind.FAIL: 5>, number=7, value=3.0, text='why', body=b'body')
    """

    kind: Kind
    number: int
    value: float = 0.0  # of a call the seconds left, of a failure the code
    text: str = ""
    body: bytes = b""

    def __bytes__(self) -> bytes:
        text = self.text.encode()
        return _HEAD.pack(self.kind, self.number, self.value, len(text)) + text + self.body

    @staticmethod
    def parse(data: bytes) -> Frame:
        """Read what `bytes` made; ValueError if it is something else."""
        if len(data) < _HEAD.size:
            raise ValueError(f"a frame of {len(data)} bytes; expected {_HEAD.size} or more")
        kind, number, value, size = _HEAD.unpack_from(data)
        end = _HEAD.size + size
        if not math.isfinite(value):
            raise ValueError(f"a frame with {value} seconds; expected a number")
        if end > len(data):
            raise ValueError(f"a frame whose text has {size} bytes, of {len(data) - _HEAD.size} behind its head")
        return Frame(Kind(kind), number, value, data[_HEAD.size : end].decode(), data[end:])


class Answer(NamedTuple):
    """What comes back: a response as bytes, and what the stages measured, as text."""

    body: bytes
    times: str = ""


class _Outgoing:
    """Frames to be written, one at a time: gRPC allows no second write before the first has ended."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque()
        self._filled = asyncio.Event()
        self.bytes = 0

    def put(self, number: int, frame: bytes, *, first: bool = False) -> None:
        """Have a frame of a call written, after the others or before them."""
        (self._frames.appendleft if first else self._frames.append)((number, frame))
        self.bytes += len(frame)
        self._filled.set()

    async def take(self) -> tuple[int, bytes]:
        """Return the next frame; waits for one."""
        await self.filled()
        found = self._frames.popleft()
        self.bytes -= len(found[1])
        return found

    async def filled(self) -> None:
        """Wait until there is a frame."""
        while not self._frames:
            self._filled.clear()
            await self._filled.wait()

    def remove(self, number: int) -> None:
        """Forget the frames of a call."""
        self._frames = deque(one for one in self._frames if one[0] != number)
        self.bytes = sum(len(frame) for _, frame in self._frames)


class Flow:
    """The caller's side of a stream: opened by the first call, and again whenever it breaks."""

    def __init__(self, channel: Any, *, name: str, max_bytes: int) -> None:
        self._open = channel.stream_stream(f"/{SERVICE}/{_FLOW}")
        self._name, self._max_bytes = name, max_bytes
        self._numbers = count()
        self._calls: dict[int, _Call] = {}
        self._outgoing = _Outgoing()
        self._running: asyncio.Task[None] | None = None

    def __call__(
        self, body: bytes, *, timeout: float, left: Callable[[], None] | None = None
    ) -> asyncio.Future[Answer]:
        """Make a call; `left` hears when it has left the stage. Failed says what went wrong; cancel it to give up."""
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        frame = bytes(Frame(Kind.ASK if left else Kind.CALL, number, timeout, body=body))
        call = self._calls[number] = _Call(loop.create_future(), left)
        call.timer = loop.call_later(timeout, self._end, number, grpc.StatusCode.DEADLINE_EXCEEDED, "no answer in time")
        if len(frame) > self._max_bytes:
            why = f"a message of {len(frame)} bytes, {self._max_bytes} are allowed"
            self._end(number, grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        else:
            self._outgoing.put(number, frame)
            call.answer.add_done_callback(lambda answer: self._forget(number) if answer.cancelled() else None)
        return call.answer

    async def close(self) -> None:
        """End the stream; calls that are under way fail."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        for number in list(self._calls):
            self._end(number, grpc.StatusCode.UNAVAILABLE, "the connection was closed")

    def _end(self, number: int, code: grpc.StatusCode, why: str) -> None:
        """Let a call fail."""
        call = self._forget(number)
        if call is not None and not call.answer.done():
            told = why if why.startswith("stage ") else f"{self._name}: {why}"
            call.answer.set_exception(Failed(code, told))

    def _forget(self, number: int) -> _Call | None:
        """Forget a call, and tell the stage if it may be computing it."""
        call = self._calls.pop(number, None)
        if call is None:
            return None
        call.timer.cancel()
        if call.is_sent:
            self._outgoing.put(number, bytes(Frame(Kind.CANCEL, number)))
        else:
            self._outgoing.remove(number)
        return call

    async def _run(self) -> None:
        while True:
            await self._outgoing.filled()
            stream = self._open(wait_for_ready=True)
            writing = asyncio.create_task(self._write(stream))
            try:
                while (data := await stream.read()) is not grpc.aio.EOF:
                    self._take(Frame.parse(data))
            except grpc.aio.AioRpcError:
                pass  # its status is asked for below
            except Exception as error:  # calls must fail rather than wait for a stream that nobody reads
                self._broke(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
            finally:
                writing.cancel()
                stream.cancel()
            await asyncio.gather(writing, return_exceptions=True)
            self._broke(await stream.code(), await stream.details() or "")
            await asyncio.sleep(_PAUSE)

    async def _write(self, stream: Any) -> None:
        while True:
            number, frame = await self._outgoing.take()
            call = self._calls.get(number)
            if call is not None:
                call.is_sent = True
            try:
                await stream.write(frame)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                if call is not None and number in self._calls:
                    call.is_sent = False
                    self._outgoing.put(number, frame, first=True)
                raise

    def _take(self, frame: Frame) -> None:
        call = self._calls.get(frame.number)
        if call is None or call.answer.done():
            return  # it was given up
        if frame.kind is Kind.LEFT:
            if call.left is not None:
                call.left()
            return
        call.is_sent = False  # nothing of it is left to cancel
        if frame.kind is Kind.DONE:
            self._forget(frame.number)
            call.answer.set_result(Answer(frame.body, frame.text))
        else:
            code = _CODES.get(int(frame.value), grpc.StatusCode.UNKNOWN)
            self._end(frame.number, code, frame.text or code.name)

    def _broke(self, code: grpc.StatusCode, why: str) -> None:
        """Let calls fail that were sent; all of them if the stage refuses the stream itself."""
        gone = code in _GONE
        for number, call in list(self._calls.items()):
            if call.is_sent or not gone:
                call.is_sent = False
                self._end(number, grpc.StatusCode.UNAVAILABLE if gone else code, why or "the connection broke")


@dataclass(slots=True, eq=False)
class _Call:
    answer: asyncio.Future[Answer]
    left: Callable[[], None] | None
    is_sent: bool = False
    timer: Any = None


Answering = Callable[[bytes, float, Callable[[], None] | None], Awaitable[Answer]]


class Flows:
    """The stage's side: every stream's calls, each answered by `answer(body, seconds left, left)`."""

    def __init__(self, answer: Answering, *, max_bytes: int) -> None:
        self._answer, self._max_bytes = answer, max_bytes
        self._ended = asyncio.Event()

    def handlers(self) -> Any:
        """Return the call as gRPC wants it."""
        return grpc.method_handlers_generic_handler(SERVICE, {_FLOW: grpc.stream_stream_rpc_method_handler(self.serve)})

    def end(self) -> None:
        """End all streams."""
        self._ended.set()

    async def serve(self, requests: Any, context: Any) -> None:
        """Answer the calls of a stream until its caller ends it, or this side."""
        tasks = [asyncio.create_task(self._serve(context)), asyncio.create_task(self._ended.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for one in tasks:
                one.cancel()

    async def _serve(self, context: Any) -> None:
        outgoing = _Outgoing()
        calls: dict[int, asyncio.Task[None]] = {}
        writing = asyncio.create_task(_written(outgoing, context))
        try:
            while (data := await context.read()) is not grpc.aio.EOF:
                frame = Frame.parse(data)
                if frame.kind is Kind.CANCEL:
                    if frame.number in calls:
                        calls[frame.number].cancel()
                    continue
                if frame.kind not in (Kind.CALL, Kind.ASK) or frame.number in calls:
                    raise ValueError(f"a frame {frame.kind.name} {frame.number}; expected a new call")
                while outgoing.bytes > self._max_bytes:  # the caller reads no answers
                    await asyncio.sleep(_PAUSE)
                task = calls[frame.number] = asyncio.create_task(self._one(frame, outgoing))
                task.add_done_callback(lambda _, number=frame.number: calls.pop(number, None))
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        finally:
            for task in [*calls.values(), writing]:
                task.cancel()

    async def _one(self, frame: Frame, outgoing: _Outgoing) -> None:
        def left() -> None:
            outgoing.put(frame.number, bytes(Frame(Kind.LEFT, frame.number)))

        try:
            answer = await self._answer(frame.body, frame.value, left if frame.kind is Kind.ASK else None)
            made = bytes(Frame(Kind.DONE, frame.number, 0, answer.times, answer.body))
            if len(made) > self._max_bytes:
                why = f"an answer of {len(made)} bytes, {self._max_bytes} are allowed"
                raise Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        except Failed as error:
            made = bytes(Frame(Kind.FAIL, frame.number, error.code.value[0], error.why[:_MOST_TEXT]))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:_MOST_TEXT]
            made = bytes(Frame(Kind.FAIL, frame.number, grpc.StatusCode.INTERNAL.value[0], why))
        outgoing.put(frame.number, made)


async def _written(outgoing: _Outgoing, context: Any) -> None:
    while True:
        await context.write((await outgoing.take())[1])
