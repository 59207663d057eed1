"""What the front of a service adds to a request, in calls of gRPC: three ways in turns.

    front       the client asks the front, which asks stage 0, which asks stage 1
    by hand     the client calls stage 0, then stage 1 with what came back
    bare        the client calls an echo server in a process of its own, with the same bytes as to the front and back;
                it is plain `grpc.aio`: no message is read or made on either side

What the front adds is the front less by hand, over a bare call. `rounds` of each, and medians.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from drumline.serve.stage_calls import ALONE
from drumline.serve.wire.frames import EXPORT
from drumline.serve.wire.manifest import Manifest, read_manifest
from drumline.serve.wire.protocol import InferRequest, path_of, stub
from drumline.serve.wire.tensors import Arrays, put_inputs, read_outputs
from serving import on_cores, processor_seconds, served

MOST_ADDED = 1.3  # bare calls
_WARM = 50
Way = Callable[[], Awaitable[None]]

_ECHO = """
import asyncio, sys
import grpc

answer = bytes.fromhex(sys.stdin.readline())

async def echo(body, context):
    return answer

async def main():
    server = grpc.aio.server()
    handlers = {sys.argv[2]: grpc.unary_unary_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(sys.argv[1], handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@contextlib.contextmanager
def echo_server(path: str, answer: bytes, cores: Sequence[int]) -> Iterator[str]:
    """Serve one call in a process of its own, which always answers the same; yields its address."""
    _, service, call = path.split("/")
    command = [sys.executable, "-c", _ECHO, service, call]
    with on_cores(cores):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(answer.hex() + "\n")
            process.stdin.flush()
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.terminate()
            process.wait(60)


def request_of(arrays: Arrays) -> Any:
    """Return a request to the model that the benchmark serves."""
    request = InferRequest(model_name="gpt")
    put_inputs(request, arrays)
    return request


async def in_turns(ways: dict[str, Way], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every way, called in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + _WARM):
        for name, way in ways.items():
            start = time.perf_counter()
            await way()
            if turn >= _WARM:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _by_hand(calls: Sequence[Callable[..., Any]], manifest: Manifest, tokens: Arrays) -> Way:
    async def way() -> None:
        arrays = tokens
        for stage, call in enumerate(calls):
            alone = (ALONE, "1"), (EXPORT, manifest.handshake(stage))
            arrays = read_outputs(await call(request_of(arrays), timeout=30, metadata=alone))

    return way


async def _measured(
    service: dict[str, Any], manifest: Manifest, tokens: Arrays, rounds: int, cores: Sequence[int]
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of every way, and those that the front's process computed for one request."""
    async with contextlib.AsyncExitStack() as stack:
        addresses = service["address"], *service["stages"]
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(address)) for address in addresses]
        front, *stages = [stub(channel, "ModelInfer") for channel in channels]
        body, path = request_of(tokens).SerializeToString(), path_of("ModelInfer")
        answer = await channels[0].unary_unary(path)(body)
        echo = await stack.enter_async_context(
            grpc.aio.insecure_channel(stack.enter_context(echo_server(path, answer, cores)))
        )
        bare_call = echo.unary_unary(path)

        async def through() -> None:
            read_outputs(await front(request_of(tokens), timeout=30))

        async def bare() -> None:
            await bare_call(body, timeout=30)

        ways: dict[str, Way] = {"front": through, "by hand": _by_hand(stages, manifest, tokens), "bare": bare}
        seconds = await in_turns(ways, rounds)
        before = processor_seconds(service["front"])
        for _ in range(rounds):
            await through()
        return seconds, (processor_seconds(service["front"]) - before) / rounds


def overhead(
    folder: Path, length: int, rounds: int, flags: Sequence[str], cores: Sequence[int], client: Sequence[int]
) -> dict[str, Any]:
    """Return what the front adds to a request of one row, in seconds and in bare calls."""
    tokens: Arrays = {"tokens": np.zeros((1, length), np.int64)}
    with served(folder, *flags, cores=cores) as service:
        seconds, computed = asyncio.run(_measured(service, read_manifest(folder), tokens, rounds, client))
    medians = {name: median(values) for name, values in seconds.items()}
    bare = medians["bare"]
    pairs = [a - b for a, b in zip(seconds["front"], seconds["by hand"], strict=True)]
    added = (medians["front"] - medians["by hand"]) / bare
    return {
        "rounds": rounds,
        "front_ms": medians["front"] * 1e3,
        "by_hand_ms": medians["by hand"] * 1e3,
        "bare_ms": bare * 1e3,
        "bare_quartiles_ms": [float(value) * 1e3 for value in np.percentile(seconds["bare"], (25, 75))],
        "added_ms": (medians["front"] - medians["by hand"]) * 1e3,
        "added_bare_calls": added,
        "pairs_ms": [float(value) * 1e3 for value in np.percentile(pairs, (10, 50, 90))],
        "front_processor_ms": computed * 1e3,
        "holds": added <= MOST_ADDED,
    }
