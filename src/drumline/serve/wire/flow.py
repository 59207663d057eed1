"""The caller's side of a stream to a stage: calls, their answers and failures (`wire.frames` draws it)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any

import grpc

from drumline.serve.wire.frames import EXPORT, FLOW, PAUSE, SERVICE, Answer, Failed, Frame, FrameKind, Lost, Outgoing

_CODES = {code.value[0]: code for code in grpc.StatusCode}
_Code = grpc.StatusCode
_OTHER, _GONE_BEFORE = "it is of another export, or another stage", "no answer in time"
_SECONDS_TO_REFUSE = 1.0
_LONG_PAUSE = 0.25  # seconds before a stage of another export is asked again
# How a stream ends if its stage does; gRPC calls it internal or unknown if that meets a message on its way.
_GONE = (_Code.OK, _Code.CANCELLED, _Code.UNAVAILABLE, _Code.INTERNAL, _Code.UNKNOWN)


class CallStream:
    """The caller's side of a stream: opened by the first call, and again whenever it breaks.

    `export` is the handshake of the manifest for the stage that must answer.
    """

    def __init__(self, channel: Any, *, stage: int, export: str, max_bytes: int) -> None:
        self._open = channel.stream_stream(f"/{SERVICE}/{FLOW}")
        self._stage, self._export, self._max_bytes = stage, export, max_bytes
        self._waits_for = ""  # why nothing is sent
        self._numbers = count()
        self._calls: dict[int, _PendingCall] = {}
        self._outgoing = Outgoing()
        self._running: asyncio.Task[None] | None = None

    def __call__(
        self,
        body: bytes,
        *,
        timeout: float,
        left: Callable[[], None] | None = None,
        done: Callable[[Answer], None] | None = None,
    ) -> asyncio.Future[Answer]:
        """Make a call; `left` hears when it has left the stage. Failed says what went wrong; cancel it to give up.

        `done` gets the answer at once, a turn of the loop before whoever awaits it; it must not raise.
        """
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        frame = bytes(Frame(FrameKind.ASK if left else FrameKind.CALL, number, timeout, body=body))
        call = self._calls[number] = _PendingCall(loop.create_future(), left, done)
        call.timer = loop.call_later(timeout, self._late, number)
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

    def _late(self, number: int) -> None:
        self._end(number, _Code.DEADLINE_EXCEEDED, self._waits_for or "no answer in time")

    def _end(self, number: int, code: grpc.StatusCode, why: str) -> None:
        """Let a call fail."""
        self._fail(number, Failed(code, why if why.startswith("stage ") else f"stage {self._stage}: {why}"))

    def _fail(self, number: int, error: Failed) -> None:
        call = self._forget(number)
        if call is not None and not call.answer.done():
            call.answer.set_exception(error)

    def _forget(self, number: int) -> _PendingCall | None:
        """Forget a call, and tell the stage if it may be computing it."""
        call = self._calls.pop(number, None)
        if call is None:
            return None
        call.timer.cancel()
        if call.is_sent:
            self._outgoing.put(number, bytes(Frame(FrameKind.CANCEL, number)))
        else:
            self._outgoing.remove(number)
        return call

    async def _run(self) -> None:
        while True:
            await self._outgoing.filled()
            stream = self._open(wait_for_ready=True, metadata=((EXPORT, self._export),))
            try:
                self._waits_for = await self._greeting(stream)
                if not self._waits_for:
                    await self._exchange(stream)
            finally:
                stream.cancel()
            if self._waits_for == _OTHER:
                await asyncio.sleep(_LONG_PAUSE)
            else:
                self._broke(await stream.code(), await stream.details() or "")
                await asyncio.sleep(PAUSE)

    async def _greeting(self, stream: Any) -> str:
        """Return nothing if a stream leads to the expected stage of the same export, else what it leads to."""
        said: Any = None
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # its status says why
            said = (await stream.initial_metadata() or {}).get(EXPORT)
        if said == self._export:
            return ""
        code = None
        with suppress(TimeoutError):  # somebody who never ends it is no stage
            code = await asyncio.wait_for(stream.code(), _SECONDS_TO_REFUSE) if said is None else None
        return _OTHER if code in (None, _Code.FAILED_PRECONDITION) else _GONE_BEFORE

    async def _exchange(self, stream: Any) -> None:
        """Write calls to a stream and take its answers until it ends."""
        writing = asyncio.create_task(self._write(stream))
        try:
            while (data := await stream.read()) is not grpc.aio.EOF:
                self._take(Frame.parse(data))
        except grpc.aio.AioRpcError:
            pass  # its status is asked for afterwards
        except Exception as error:  # calls must fail rather than wait for a stream that nobody reads
            self._broke(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            writing.cancel()
            stream.cancel()  # also lets a write end that its reader does not take
        await asyncio.gather(writing, return_exceptions=True)

    async def _write(self, stream: Any) -> None:
        while (following := await self._outgoing.take()) is not None:
            number, frame = following
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
        if frame.kind is FrameKind.LEFT:
            if call.left is not None:
                call.left()
            return
        call.is_sent = False  # nothing of it is left to cancel
        if frame.kind is FrameKind.DONE:
            del self._calls[frame.number]
            call.timer.cancel()
            answer = Answer(frame.body, frame.text)
            if call.done is not None:
                call.done(answer)
            call.answer.set_result(answer)
        elif frame.kind is FrameKind.LOST:
            self._fail(frame.number, Lost(int(frame.value), frame.text))
        else:
            code = _CODES.get(int(frame.value), grpc.StatusCode.UNKNOWN)
            self._end(frame.number, code, frame.text or code.name)

    def _broke(self, code: grpc.StatusCode, why: str) -> None:
        """Let calls fail that were sent; all of them if the stage refuses the stream itself."""
        gone = code in _GONE
        for number, call in list(self._calls.items()):
            if call.is_sent or not gone:
                call.is_sent = False
                if gone:
                    self._fail(number, Lost(self._stage, f"stage {self._stage}: {why or 'the connection broke'}"))
                else:
                    self._end(number, code, why or "the connection broke")


@dataclass(slots=True, eq=False)
class _PendingCall:
    answer: asyncio.Future[Answer]
    left: Callable[[], None] | None
    done: Callable[[Answer], None] | None
    is_sent: bool = False
    timer: Any = None
