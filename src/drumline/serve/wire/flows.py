"""The stage's side of its streams: every call is a task, and its answer a frame (`wire.frames` draws it)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from drumline.serve.wire.frames import EXPORT, FLOW, PAUSE, SERVICE, Answer, Failed, Frame, FrameKind, Lost, Outgoing

_MOST_TEXT = 2000  # characters of an error
_SECONDS_TO_WRITE = 5.0  # for what is left when a stream ends; its caller may not read
Home = Callable[[Answer], None]
Answering = Callable[[bytes, float, Callable[[], None] | None, Home], Awaitable[Answer]]


class Flows:
    """The stage's side: every stream's calls, each answered by `answer(body, seconds left, left, home)`.

    It may send its answer `home` before it returns it, which saves a turn of the loop. A stream that does not name the
    same `export` and stage is refused before it is read.
    """

    def __init__(self, answer: Answering, *, export: str, max_bytes: int) -> None:
        self._answer, self._export, self._max_bytes = answer, export, max_bytes
        self._ended = asyncio.Event()

    def handlers(self) -> Any:
        """Return the call as gRPC wants it."""
        return grpc.method_handlers_generic_handler(SERVICE, {FLOW: grpc.stream_stream_rpc_method_handler(self.serve)})

    def end(self) -> None:
        """End all streams."""
        self._ended.set()

    async def serve(self, requests: Any, context: Any) -> None:
        """Answer the calls of a stream until its caller ends it, or this side."""
        await check_export(context, self._export)
        await context.send_initial_metadata(((EXPORT, self._export),))
        tasks = [asyncio.create_task(self._serve(context)), asyncio.create_task(self._ended.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()

    async def _serve(self, context: Any) -> None:
        outgoing = Outgoing()
        calls: dict[int, asyncio.Task[None]] = {}
        writing = asyncio.create_task(_written(outgoing, context))
        wrong: ValueError | None = None
        try:
            try:
                await self._read(context, outgoing, calls)
                if calls:  # a caller that asks for nothing more may still wait for answers
                    await asyncio.wait(calls.values())
            except ValueError as error:
                wrong = error
                outgoing.clear()
            # gRPC never ends a call whose write is cancelled in the middle.
            outgoing.close()
            await asyncio.wait({writing}, timeout=_SECONDS_TO_WRITE)
            if wrong is not None:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(wrong))
        finally:
            for task in [*calls.values(), writing]:
                task.cancel()

    async def _read(self, context: Any, outgoing: Outgoing, calls: dict[int, asyncio.Task[None]]) -> None:
        """Start the calls of a stream until it ends; ValueError if something else than a call comes."""
        while (data := await context.read()) is not grpc.aio.EOF:
            frame = Frame.parse(data)
            if frame.kind is FrameKind.CANCEL:
                if frame.number in calls:
                    calls[frame.number].cancel()
                continue
            if frame.kind not in (FrameKind.CALL, FrameKind.ASK) or frame.number in calls:
                raise ValueError(f"a frame {frame.kind.name} {frame.number}; expected a new call")
            while outgoing.bytes > self._max_bytes:  # the caller reads no answers
                await asyncio.sleep(PAUSE)
            task = calls[frame.number] = asyncio.create_task(self._answer_call(frame, outgoing))
            task.add_done_callback(partial(_forgotten, calls, frame.number))

    async def _answer_call(self, frame: Frame, outgoing: Outgoing) -> None:
        sent = False

        def left() -> None:
            outgoing.put(frame.number, bytes(Frame(FrameKind.LEFT, frame.number)))

        def home(answer: Answer) -> None:
            nonlocal sent
            if not sent:
                sent = True
                outgoing.put(frame.number, self._framed(frame.number, answer))

        try:
            home(await self._answer(frame.body, frame.value, left if frame.kind is FrameKind.ASK else None, home))
        except Failed as error:
            outgoing.put(frame.number, _failure(frame.number, error))
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            outgoing.put(frame.number, _failure(frame.number, Failed(grpc.StatusCode.INTERNAL, why)))

    def _framed(self, number: int, answer: Answer) -> bytes:
        frame_bytes = bytes(Frame(FrameKind.DONE, number, 0, answer.times, answer.body))
        if len(frame_bytes) <= self._max_bytes:
            return frame_bytes
        why = f"an answer of {len(frame_bytes)} bytes, {self._max_bytes} are allowed"
        return _failure(number, Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, why))


async def check_export(context: Any, export: str) -> None:
    """End a call whose caller does not name the same export and stage."""
    named = dict(context.invocation_metadata() or ()).get(EXPORT)
    if named != export:
        why = f"it is {export[:12]}, stage {export.rpartition(' ')[2]}; the caller names {_short(named)} in {EXPORT}"
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)


def _short(named: object) -> str:
    """Return what a caller names, as short as digests are told.

    >>> _short("0123456789abcdef 1"), _short(None)
    ('0123456789ab, stage 1', 'nothing')
    """
    if not isinstance(named, str):
        return "nothing"
    digest, _, stage = named.rpartition(" ")
    return f"{digest[:12]}, stage {stage[:12]}"


def _failure(number: int, error: Failed) -> bytes:
    if isinstance(error, Lost):
        return bytes(Frame(FrameKind.LOST, number, error.stage, error.why[:_MOST_TEXT]))
    return bytes(Frame(FrameKind.FAIL, number, error.code.value[0], error.why[:_MOST_TEXT]))


def _forgotten(calls: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]) -> None:
    calls.pop(number, None)


async def _written(outgoing: Outgoing, context: Any) -> None:
    while (frame := await outgoing.take()) is not None:
        await context.write(frame[1])
