"""One stage as a process: takes a microbatch, computes it, hands it to the next stage, and returns the answer.

    front ──► stage 0 ──► stage 1 ──► ... ──► last stage
          ◄──         ◄──         ◄──     ◄──            each call stays open until its answer has come back

So a deadline or a cancelled call reaches every stage by itself, and an error says which stage it comes from. A stage
computes one microbatch at a time, in the order of arrival, and refuses more than `limit` open calls. It tells a caller
that asks when a microbatch has left it (initial metadata), and every caller when it arrived, began and ended (trailing
metadata).

This process imports numpy, onnxruntime and grpc, and no PyTorch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from drumline.core.errors import DrumlineError
from drumline.serve.session import Session
from drumline.serve.wire.links import PLAIN, Tls, connect, listen, options
from drumline.serve.wire.manifest import Manifest, read_manifest
from drumline.serve.wire.protocol import SERVICE, InferRequest, InferResponse, message, stub
from drumline.serve.wire.tensors import Refused, put_inputs, put_outputs, read_inputs

ALONE = "drumline-alone"  # metadata of a call that the stage answers itself, without the stages behind it
TELL = "drumline-tell"  # of a call whose caller wants to know when it leaves this stage
TIMES = "drumline-times"
MAX_BYTES = 64 * 2**20
_GRACE = 5.0  # seconds for open calls when the process is told to stop


@dataclass(frozen=True, slots=True)
class Times:
    """What a stage measured of a microbatch: nanoseconds of its monotonic clock, and bytes in and out."""

    stage: int
    arrived: int
    start: int
    end: int
    sent: int
    bytes_in: int
    bytes_out: int

    def __str__(self) -> str:
        return ",".join(str(getattr(self, name)) for name in self.__slots__)

    @staticmethod
    def parse(text: str) -> Times:
        """Read what `str` wrote.

        >>> Times.parse("0,1,2,3,4,5,6").end
        3
        """
        return Times(*map(int, text.split(",")))


def times_of(metadata: Any) -> list[Times]:
    """Return what stages measured, from the metadata behind an answer."""
    pairs = ((key, value) for key, value in metadata or ())
    return sorted((Times.parse(str(value)) for key, value in pairs if key == TIMES), key=lambda one: one.stage)


class StageService:
    """The calls of a stage."""

    def __init__(self, manifest: Manifest, number: int, session: Session, *, following: Any = None, limit: int) -> None:
        self.number, self.limit = number, limit
        self._manifest, self._mine = manifest, manifest.stages[number]
        self._session, self._next = session, following
        self._turn = asyncio.Lock()  # hands out turns in the order of asking
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compute")
        self._open = 0

    def handlers(self) -> Any:
        """Return the calls as gRPC wants them; answers are bytes already."""
        infer = grpc.unary_unary_rpc_method_handler(self.infer, request_deserializer=InferRequest.FromString)
        ready = grpc.unary_unary_rpc_method_handler(
            self.ready,
            request_deserializer=message("ServerReadyRequest").FromString,
            response_serializer=message("ServerReadyResponse").SerializeToString,
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"ModelInfer": infer, "ServerReady": ready})

    async def ready(self, request: Any, context: Any) -> Any:
        """Say that the stage has loaded its graph."""
        return message("ServerReadyResponse")(ready=True)

    async def infer(self, request: Any, context: Any) -> bytes:
        """Compute a microbatch and return the answer of the last stage."""
        arrived = time.monotonic_ns()
        if self._open >= self.limit:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"stage {self.number} has {self._open} open calls")
        self._open += 1
        try:
            return await self._infer(request, context, arrived)
        finally:
            self._open -= 1

    async def _infer(self, request: Any, context: Any, arrived: int) -> bytes:
        try:
            arrays = read_inputs(request, self._mine.inputs, self._manifest.dimensions)
        except Refused as error:
            return await self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        async with self._turn:
            left = context.time_remaining()
            if left is not None and left <= 0:
                return await self._abort(context, grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
            start = time.monotonic_ns()
            try:
                made = await self._computed(arrays)
            except ValueError as error:
                return await self._abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
            end = time.monotonic_ns()
        asked = {key for key, _ in context.invocation_metadata() or ()}
        if TELL in asked:
            await context.send_initial_metadata(())
        sizes = sum(map(len, request.raw_input_contents)), sum(one.nbytes for one in made.values())
        if self._next is None or ALONE in asked:
            response = InferResponse(model_name=self._manifest.model, id=request.id)
            put_outputs(response, made)
            context.set_trailing_metadata(((TIMES, str(Times(self.number, arrived, start, end, end, *sizes))),))
            answer: bytes = response.SerializeToString()
            return answer
        further = InferRequest(model_name=request.model_name, id=request.id)
        put_inputs(further, made)
        del arrays, made
        sent = time.monotonic_ns()
        # A stage that is being started again is waited for, as long as anybody waits for the answer.
        call = self._next(further.SerializeToString(), timeout=context.time_remaining(), wait_for_ready=True)
        times = ((TIMES, str(Times(self.number, arrived, start, end, sent, *sizes))),)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            context.set_trailing_metadata((*times, *_passed_on(error.trailing_metadata())))
            details = error.details() or ""
            told = details if details.startswith("stage ") else f"stage {self.number + 1}: {details}"
            await context.abort(error.code(), told)
        context.set_trailing_metadata((*times, *_passed_on(await call.trailing_metadata())))
        return answer

    async def _computed(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Run the graph in its thread; a cancelled call stops it there."""
        running = self._session.begin(arrays)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, running)
        except asyncio.CancelledError:
            running.stop()
            raise

    async def _abort(self, context: Any, code: grpc.StatusCode, why: str) -> bytes:
        await context.abort(code, f"stage {self.number}: {why}")
        raise AssertionError


def _passed_on(metadata: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in metadata or () if key == TIMES]


async def run_stage(
    folder: Path,
    number: int,
    address: str,
    following: str,
    *,
    tls: Tls = PLAIN,
    threads: int,
    limit: int,
    max_bytes: int,
) -> None:
    """Serve a stage until told to stop; prints `ready` once it can compute."""
    manifest = read_manifest(folder)
    session = Session(folder, manifest, number, threads=threads)
    session.warm_up()
    server = grpc.aio.server(options=options(max_bytes), maximum_concurrent_rpcs=4 * limit)
    behind = stub(connect(following, tls, max_bytes), "ModelInfer", raw=True) if following else None
    service = StageService(manifest, number, session, following=behind, limit=limit)
    server.add_generic_rpc_handlers((service.handlers(),))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    listen(server, address, tls)
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    print("ready", flush=True)
    await stopped.wait()
    await healthy.enter_graceful_shutdown()
    await server.stop(_GRACE)


def _end_with_parent() -> None:
    """End this process when the one that started it does: its end of the pipe closes."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main(words: Sequence[str] | None = None) -> int:
    """Run a stage as the front starts it."""
    parser = argparse.ArgumentParser(prog="drumline.serve.stage")
    parser.add_argument("folder", type=Path)
    parser.add_argument("number", type=int)
    parser.add_argument("address")
    parser.add_argument("--next", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES)
    args = parser.parse_args(words)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    np.seterr(all="ignore")
    try:
        asyncio.run(
            run_stage(
                args.folder,
                args.number,
                args.address,
                args.next,
                threads=args.threads,
                limit=args.limit,
                max_bytes=args.max_bytes,
            )
        )
    except DrumlineError as error:
        print(f"stage {args.number}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
