"""One stage on a host: `drumline serve DIR --stage K`. A keeper starts it again, from a copy of the export.

::

    front ── asks ──► stage process ◄── started by ── keeper
    what was I at work on when I ended?    the keeper has read it in the ledger, and says it at start
"""

from __future__ import annotations

import asyncio
import signal
from dataclasses import asdict
from pathlib import Path

from drumline.serve.logs import EventLog, with_libraries
from drumline.serve.stage import check_place
from drumline.serve.stages.home import ModelHome
from drumline.serve.stages.keeper import StageKeeper
from drumline.serve.wire.links import Tls
from drumline.serve.wire.manifest import read_manifest


async def host_stage(
    folder: Path,
    number: int,
    address: str,
    following: str,
    *,
    tls: Tls,
    threads: int,
    limit: int,
    max_bytes: int,
    hang: float = 0.0,
) -> None:
    """Keep a stage running until SIGTERM or SIGINT; prints `ready` once it can compute."""
    manifest = read_manifest(folder)
    check_place(number, len(manifest.stages), following)
    tls.server()  # raises before anything is started
    log, home = EventLog(), ModelHome()
    stopped = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stopped.set)
    arguments = {
        "folder": str(home.export),
        "export": manifest.digest,
        "number": number,
        "address": address,
        "following": following,
        "threads": threads,
        "limit": limit,
        "max_bytes": max_bytes,
        "tls": asdict(tls),
        "cores": [],
        "message_cores": [],
    }
    keeper = StageKeeper(arguments, home.path, log=log, hang=hang)
    try:
        with with_libraries(log):
            await asyncio.to_thread(home.hold, folder, manifest)
            await _keep(keeper, stopped)
    finally:
        home.remove()
        log.close()


async def _keep(keeper: StageKeeper, stopped: asyncio.Event) -> None:
    """Keep a stage until told to stop; raises why it could not be kept."""
    keeping = asyncio.create_task(keeper.keep())
    telling = asyncio.create_task(_tell_ready(keeper))
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({keeping, stopping}, return_when=asyncio.FIRST_COMPLETED)
    keeper.stop()
    await keeper.stopped()
    for task in (telling, stopping):
        task.cancel()
    await keeping


async def _tell_ready(keeper: StageKeeper) -> None:
    await keeper.ready.wait()
    print("ready", flush=True)
