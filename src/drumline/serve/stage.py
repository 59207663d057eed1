"""One stage as a process, by itself or as a front starts it. `serve.stage_calls` says what it answers.

This process imports numpy, onnxruntime and grpc, and no PyTorch.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from drumline.core.errors import DrumlineError, RecordError, UsageError
from drumline.serve.cores import stay_on
from drumline.serve.ledger import Ledger
from drumline.serve.logs import EventLog, with_libraries
from drumline.serve.session import Session
from drumline.serve.stage_calls import StagePast, StageService
from drumline.serve.wire.files import remove_home
from drumline.serve.wire.flow import CallStream
from drumline.serve.wire.flows import Flows
from drumline.serve.wire.links import PLAIN, Tls, connect, listen, options
from drumline.serve.wire.manifest import Manifest, read_manifest

MAX_BYTES = 64 * 2**20
_BEAT = 0.2  # seconds between two signs of life
_GRACE = 5.0  # seconds for open calls when the process is told to stop


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
    ledger: Ledger | None = None,
    export: str = "",
    past: StagePast | None = None,
    cores: Sequence[int] = (),
    message_cores: Sequence[int] = (),
) -> None:
    """Serve a stage until told to stop; prints `ready` once it can compute.

    `export` is the digest that the manifest must have. It computes on `cores`, and where there are `message_cores`,
    all else happens on those.
    """
    if cores:
        stay_on(cores)
    manifest = read_manifest(folder)
    check_place(number, len(manifest.stages), following)
    if export and manifest.digest != export:
        raise RecordError(f"{folder} is another export, {manifest.digest[:12]}", expected=export[:12])
    session = Session(folder, manifest, number, threads=threads)
    session.warm_up()
    if message_cores:  # all threads from here on, but for that of computations
        stay_on(message_cores)
    server = grpc.aio.server(options=options(max_bytes), maximum_concurrent_rpcs=4 * limit)
    channel = connect(following, tls, max_bytes) if following else None
    behind = None if channel is None else _following(channel, manifest, number + 1, max_bytes)
    service = StageService(
        manifest, number, session, following=behind, limit=limit, ledger=ledger, past=past, cores=cores
    )
    flows = Flows(service.answer, export=manifest.handshake(number), max_bytes=max_bytes)
    server.add_generic_rpc_handlers((*service.handlers(), flows.handlers()))
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    listen(server, address, tls)
    await server.start()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    loop.add_signal_handler(signal.SIGINT, stopped.set)
    beating = asyncio.create_task(_beat(service))
    print("ready", flush=True)
    await stopped.wait()
    await healthy.enter_graceful_shutdown()
    await service.drained(_GRACE)
    flows.end()
    await server.stop(_GRACE)
    if behind is not None and channel is not None:
        await behind.close()
        await channel.close()
    beating.cancel()


def _following(channel: Any, manifest: Manifest, stage: int, max_bytes: int) -> CallStream:
    return CallStream(channel, stage=stage, export=manifest.handshake(stage), max_bytes=max_bytes)


async def _beat(service: StageService) -> None:
    """Show the front that this event loop runs."""
    while True:
        service.ledger.beat(service.worked())
        await asyncio.sleep(_BEAT)


def check_place(number: int, count: int, following: str) -> None:
    """Refuse a stage that there is none of, and one without the address of the stage behind it.

    >>> check_place(0, 2, "")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: stage 0 of 2 has no next stage; add --next HOST:PORT, the address of stage 1
    """
    if not 0 <= number < count:
        raise UsageError(f"there is no stage {number}", expected=f"a number below {count}")
    if number + 1 < count and not following:
        fix = f"add --next HOST:PORT, the address of stage {number + 1}"
        raise UsageError(f"stage {number} of {count} has no next stage", fix=fix)
    if number + 1 == count and following:
        raise UsageError(f"stage {number} is the last one", fix="leave out --next")


class _WithParent(threading.Thread):
    """Ends this process with the one that started it, whose end of the pipe then closes, and removes its folder."""

    def __init__(self, home: Path) -> None:
        super().__init__(daemon=True)
        self._home, self._is_removing = home, threading.Lock()

    def run(self) -> None:
        """Wait for the end of the other process."""
        while os.read(sys.stdin.fileno(), 4096):
            pass
        with self._is_removing:
            remove_home(self._home)
            os._exit(0)

    def finish(self) -> None:
        """Let this process end by itself, but not while it removes the folder, which may be why it ends."""
        self._is_removing.acquire()


def main(text: str) -> int:
    """Run a stage as the front starts it: by the arguments of `run_stage` as JSON."""
    arguments = json.loads(text)
    parent = _WithParent(Path(arguments.pop("home")))
    parent.start()
    np.seterr(all="ignore")
    past, tls, log = StagePast(**arguments.pop("past")), Tls(**arguments.pop("tls", {})), EventLog()
    try:
        folder, ledger = Path(arguments.pop("folder")), Ledger(Path(arguments.pop("ledger")))
        with with_libraries(log):
            asyncio.run(run_stage(folder, ledger=ledger, past=past, tls=tls, **arguments))
    except DrumlineError as error:
        print(f"stage {arguments['number']}: {error}", file=sys.stderr, flush=True)
        return 2
    finally:
        log.close()
        parent.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
