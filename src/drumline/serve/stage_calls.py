"""The calls of a stage: it takes a microbatch, computes it, hands it to the next stage, and returns the answer.

    front ──► stage 0 ──► stage 1 ──► ... ──► last stage
          ◄──         ◄──         ◄──     ◄──            each call stays open until its answer has come back

So a deadline or a cancelled call reaches every stage, and an error says which stage it comes from. A stage computes one
microbatch at a time, in the order of arrival, and refuses more than `limit` open calls. It tells a caller that asks
when a microbatch has left it, and every caller when it arrived, began and ended. Front and stages call each other over
a stream (`wire.flow`); `ModelInfer` answers a client that calls a stage by hand.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from drumline.serve.cores import stay_on
from drumline.serve.ledger import Ledger
from drumline.serve.session import Running, Session
from drumline.serve.wire.flow import CallStream
from drumline.serve.wire.flows import Home, check_export
from drumline.serve.wire.frames import SERVICE as STAGE_SERVICE
from drumline.serve.wire.frames import STRUCK, Answer, Failed
from drumline.serve.wire.manifest import Manifest
from drumline.serve.wire.protocol import SERVICE, InferRequest, InferResponse, handler, message
from drumline.serve.wire.stage_times import StageTimes
from drumline.serve.wire.tensors import Refused, put_inputs, put_outputs, read_inputs

ALONE = "drumline-alone"  # metadata of a call that the stage answers itself, without the stages behind it
_LONGEST = 3600.0  # seconds for a call by hand without a deadline
_Code = grpc.StatusCode


@dataclass(frozen=True, slots=True)
class StagePast:
    """What a keeper tells a stage that it starts: since when it keeps it, and how it ended before, at work on what."""

    since: float = field(default_factory=time.monotonic)
    restarts: int = 0
    struck: Sequence[tuple[str, str]] = ()

    def state_of(self, name: str, ledger: Ledger) -> dict[str, Any]:
        """Return what became of a microbatch here.

        >>> StagePast(struck=[("a", "it ended")]).state_of("a", Ledger())["how"]
        'it ended'
        """
        at_work = name in ledger.read().names
        return {"seconds": time.monotonic() - self.since, "at_work": at_work, "how": dict(self.struck).get(name, "")}


class StageService:
    """The calls of a stage."""

    def __init__(
        self,
        manifest: Manifest,
        number: int,
        session: Session,
        *,
        following: CallStream | None = None,
        limit: int,
        ledger: Ledger | None = None,
        past: StagePast | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        self.number, self.limit, self._cores = number, limit, cores
        self._past = past or StagePast()
        self.ledger = ledger or Ledger()
        self._manifest, self._mine = manifest, manifest.stages[number]
        self._session, self._next = session, following
        self._turn = asyncio.Lock()  # hands out turns in the order of asking
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._begun)
        self._clock: int | None = None  # of the processor time of that thread
        self._open = 0
        self._is_stopping = False

    def _begun(self) -> None:
        if self._cores:
            stay_on(self._cores)
        # With more threads it may be theirs to work, while this one waits.
        if self._session.threads == 1 and hasattr(time, "pthread_getcpuclockid"):
            self._clock = time.pthread_getcpuclockid(threading.get_ident())

    def worked(self) -> int:
        """Return the processor time of computations in nanoseconds; where that is unknown, of the whole process."""
        return time.process_time_ns() if self._clock is None else time.clock_gettime_ns(self._clock)

    def handlers(self) -> list[Any]:
        """Return the unary calls as gRPC wants them; requests and answers are bytes already."""
        named = {"ServerReady": self.ready, "ServerMetadata": self.metadata}
        calls = {call: handler(call, answer) for call, answer in named.items()}
        calls["ModelInfer"] = grpc.unary_unary_rpc_method_handler(self.infer)
        struck = {STRUCK: grpc.unary_unary_rpc_method_handler(self.struck)}
        services = {SERVICE: calls, STAGE_SERVICE: struck}
        return [grpc.method_handlers_generic_handler(service, handlers) for service, handlers in services.items()]

    async def ready(self, request: Any, context: Any) -> Any:
        """Say that the stage has loaded its graph."""
        return message("ServerReadyResponse")(ready=True)

    async def metadata(self, request: Any, context: Any) -> Any:
        """Say which stage of which export this is."""
        identity, restarts = self._manifest.identity(self.number), str(self._past.restarts)
        return message("ServerMetadataResponse")(name=identity, version=restarts)

    async def struck(self, body: bytes, context: Any) -> bytes:
        """Say whether this stage is at work on a microbatch, or was when it ended."""
        await check_export(context, self._manifest.handshake(self.number))
        return json.dumps(self._past.state_of(body.decode(errors="replace"), self.ledger)).encode()

    async def infer(self, body: bytes, context: Any) -> bytes:
        """Answer a client that calls this stage by hand; it names the export, as others do."""
        await check_export(context, self._manifest.handshake(self.number))
        asked = {key for key, _ in context.invocation_metadata() or ()}
        left = context.time_remaining()
        try:
            answer = await self.answer(body, _LONGEST if left is None else left, alone=ALONE in asked)
        except Failed as error:
            await context.abort(error.code, error.why)
            raise AssertionError from error
        return answer.body

    async def answer(
        self,
        body: bytes,
        seconds: float,
        left: Callable[[], None] | None = None,
        home: Home | None = None,
        *,
        alone: bool = False,
    ) -> Answer:
        """Compute a microbatch and return the answer of the last stage; `alone`: this stage's own.

        `home` gets an answer that comes from further stages as soon as it is there.
        """
        arrived = time.monotonic_ns()
        if self._is_stopping:
            raise self._failed(_Code.UNAVAILABLE, "it is stopping")
        if self._open >= self.limit:
            raise self._failed(_Code.RESOURCE_EXHAUSTED, f"it has {self._open} open calls")
        self._open += 1
        try:
            return await self._answer(body, arrived, time.monotonic() + seconds, left, home, alone)
        finally:
            self._open -= 1

    async def drained(self, seconds: float) -> None:
        """Take no more calls, and wait until those under way are answered, at most so long."""
        self._is_stopping = True
        end = time.monotonic() + seconds
        while self._open and time.monotonic() < end:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)  # the last answers are being written

    async def _answer(
        self,
        body: bytes,
        arrived: int,
        deadline: float,
        left: Callable[[], None] | None,
        home: Home | None,
        alone: bool,
    ) -> Answer:
        try:
            request = InferRequest.FromString(body)
            arrays = read_inputs(request, self._mine.inputs, self._manifest.dimensions)
        except Refused as error:
            raise self._failed(_Code.INVALID_ARGUMENT, str(error)) from None
        except DecodeError:
            raise self._failed(_Code.INVALID_ARGUMENT, "the message is no request") from None
        size = sum(map(len, request.raw_input_contents))
        async with self._turn:
            if time.monotonic() >= deadline:
                raise self._failed(_Code.DEADLINE_EXCEEDED, "the deadline has passed")
            start = time.monotonic_ns()
            try:
                arrays_made = await self._computed(arrays, request.id)
            except ValueError as error:
                raise self._failed(_Code.INVALID_ARGUMENT, str(error)) from None
            except MemoryError as error:
                raise self._failed(_Code.RESOURCE_EXHAUSTED, str(error) or "no memory") from None
            end = time.monotonic_ns()
        sizes = size, sum(value.nbytes for value in arrays_made.values())
        if self._next is None or alone:
            if left is not None:
                left()
            times = str(StageTimes(self.number, arrived, start, end, end, *sizes))
            with self.ledger.packing(request.id):
                response = InferResponse(model_name=self._manifest.model, id=request.id)
                put_outputs(response, arrays_made)
                return Answer(response.SerializeToString(), times)
        with self.ledger.packing(request.id):
            further = InferRequest(id=request.id)
            put_inputs(further, arrays_made)
            packed = further.SerializeToString()
        del arrays, arrays_made, request, further
        sent = time.monotonic_ns()
        times = str(StageTimes(self.number, arrived, start, end, sent, *sizes))

        def whole(behind: Answer) -> Answer:
            return Answer(behind.body, f"{times};{behind.times}")

        done = None if home is None else lambda behind: home(whole(behind))
        # A stage that is being started again is waited for, as long as anybody waits for the answer.
        behind = self._next(packed, timeout=deadline - time.monotonic(), done=done)
        if left is not None:  # after the microbatch itself, which is waited for
            left()
        return whole(await behind)

    async def _computed(self, arrays: Mapping[str, Any], name: str) -> dict[str, Any]:
        """Run the graph in its thread; a cancelled call stops it there."""
        work = _Work(self._session.begin(arrays), self.ledger, name)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except asyncio.CancelledError:
            work.stop()
            raise

    def _failed(self, code: grpc.StatusCode, why: str) -> Failed:
        return Failed(code, f"stage {self.number}: {why}")


class _Work:
    """A computation, which the ledger knows of from before its start."""

    def __init__(self, running: Running, ledger: Ledger, name: str) -> None:
        self._running, self._ledger, self._name = running, ledger, name
        self._number = 0
        self._is_stopped = False

    def __call__(self) -> dict[str, Any]:
        with self._ledger.computing(self._name) as self._number:
            if self._is_stopped:  # in the moment before it began
                self._ledger.unwanted(self._number)
            return self._running()

    def stop(self) -> None:
        """Let it end soon; from now on no request waits for it."""
        self._is_stopped = True
        self._running.stop()
        self._ledger.unwanted(self._number)
