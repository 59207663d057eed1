"""Stages as processes of this machine: started, watched, started again if they end or hang; or on hosts, asked often.

A stage's ledger says on which microbatches it was at work when it ended. Those are not sent again: one of them may be
why it ended.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc

from drumline.core.errors import LaunchError
from drumline.serve.front.hang import HangWatch
from drumline.serve.front.logs import EventLog
from drumline.serve.front.metrics import Metrics
from drumline.serve.ledger import Ledger
from drumline.serve.wire.links import LOOPBACK, Tls, connect, free_port, local_links
from drumline.serve.wire.protocol import message, stub

_SECONDS_TO_START = 120.0
_SECONDS_TO_STOP = 8.0
_QUICK_END = 5.0  # a stage that ends sooner than this after its start waits before the next one
_LONGEST_PAUSE = 5.0
_MOST_STRUCK = 1000  # microbatches to remember
_SECONDS_TO_NOTICE = 1.0  # that a stage has ended, after the connection to it broke
_LOOK = 0.01  # seconds until a stage that is still at work on a lost microbatch is looked at again


class ServedStages:
    """The stages behind a front: where they are, and whether all of them can compute."""

    addresses: Sequence[str]
    links: Sequence[str]  # where front and stages reach them: the same, or sockets of this machine, which are faster

    def __init__(self, num_stages: int) -> None:
        self._ready = [asyncio.Event() for _ in range(num_stages)]

    @property
    def are_ready(self) -> bool:
        """Whether every stage can compute."""
        return all(event.is_set() for event in self._ready)

    @property
    def down(self) -> list[int]:
        """The stages that cannot compute now."""
        return [number for number, event in enumerate(self._ready) if not event.is_set()]

    async def back(self, seconds: float) -> bool:
        """Wait until every stage can compute, at most so long; whether that came true."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(seconds, 0)):
                for event in self._ready:
                    await event.wait()
        return self.are_ready

    async def struck(self, name: str, stage: int, seconds: float) -> str:
        """Return why a microbatch that a stage lost must not be sent again, or an empty text.

        Waits at most so long while a stage is still at work on it.
        """
        raise NotImplementedError

    async def start(self) -> None:
        """Start what has to be started, and wait until all stages can compute."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop what was started."""
        raise NotImplementedError


class LocalStages(ServedStages):
    """One process for each stage, on ports of the loopback interface."""

    def __init__(
        self,
        folder: Path,
        num_stages: int,
        *,
        threads: int,
        limit: int,
        max_bytes: int,
        log: EventLog,
        metrics: Metrics,
        hang: float = 0.0,
        cores: Sequence[Sequence[int]] = (),
    ) -> None:
        super().__init__(num_stages)
        self.addresses = [f"{LOOPBACK}:{free_port()}" for _ in range(num_stages)]
        self._sockets = tempfile.TemporaryDirectory(prefix="drumline-")  # only this user may enter it
        self.links = local_links(Path(self._sockets.name), num_stages) or self.addresses
        self.processes: list[Any] = [None] * num_stages
        self._log, self._metrics = log, metrics
        self._how = {"folder": str(folder), "threads": threads, "limit": limit, "max_bytes": max_bytes}
        self._cores = cores
        self._watching: list[asyncio.Task[None]] = []
        self._has_run = [False] * num_stages
        self._hang = hang
        self._ledgers: list[Ledger | None] = [None] * num_stages
        self._struck: deque[tuple[str, str]] = deque(maxlen=_MOST_STRUCK)  # microbatches, and how their stages ended
        self._stopping = False

    async def start(self) -> None:
        """Start all stages at once; LaunchError if one ends instead of getting ready."""
        self._watching = [asyncio.create_task(self._watch(number)) for number in range(len(self.addresses))]
        ready = asyncio.create_task(self.back(_SECONDS_TO_START))
        done, _ = await asyncio.wait({ready, *self._watching}, return_when=asyncio.FIRST_COMPLETED)
        if ready not in done or not self.are_ready:
            ready.cancel()
            failed = [task.exception() for task in self._watching if task.done() and not task.cancelled()]
            await self.stop()
            raise next((error for error in failed if error is not None), None) or LaunchError(
                f"the stages were not ready within {_SECONDS_TO_START:g} seconds"
            )

    async def _watch(self, number: int) -> None:
        """Keep a stage running: start it, wait for its end, start it again."""
        pause = 0.0
        while not self._stopping:
            began = time.monotonic()
            code = await self._once(number)
            if self._stopping:
                return
            if not self._has_run[number]:
                raise LaunchError(
                    f"stage {number} ended with code {code} before it was ready", fix="see its error above"
                )
            self._log("stage ended", level="error", stage=number, code=code)
            self._metrics.restarts.labels(str(number)).inc()
            quick = time.monotonic() - began < _QUICK_END
            pause = min(max(2 * pause, 0.1), _LONGEST_PAUSE) if quick else 0.0
            await asyncio.sleep(pause)

    async def _once(self, number: int) -> int:
        path = Path(self._sockets.name, f"ledger{number}")
        ledger = self._ledgers[number] = Ledger.create(path)
        own_entries = {
            "number": number,
            "address": self.addresses[number],
            "following": self.links[number + 1] if number + 1 < len(self.links) else "",
            "also": "" if self.links is self.addresses else self.links[number],
            "cores": list(self._cores[number]) if self._cores else [],
            "ledger": str(path),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "drumline.serve.stage", json.dumps(self._how | own_entries),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self.processes[number] = process
        watching = asyncio.create_task(self._hangs(number, process, ledger))
        try:
            code = await process.wait()
        finally:
            self._ready[number].clear()
            watching.cancel()
        hung = watching.result() if watching.done() and not watching.cancelled() else ""
        # Together, without a wait: a microbatch is in a ledger that is read, or among those that were struck.
        how = f"it hung and was ended ({hung})" if hung else f"it ended with code {code}"
        self._struck += [(name, f"stage {number}: {how}, at work on this") for name in ledger.read().names]
        self._ledgers[number] = None
        return code

    async def _hangs(self, number: int, process: Any, ledger: Ledger) -> str:
        """Wait until a stage is ready, and then end it if it hangs; returns why it was ended."""
        try:
            async with asyncio.timeout(_SECONDS_TO_START if self._has_run[number] else None):
                is_ready = await process.stdout.readline() == b"ready\n"
        except TimeoutError:
            return self._end(number, process, f"it was not ready within {_SECONDS_TO_START:g} seconds")
        if not is_ready:
            return ""  # it has ended, and said why
        self._ready[number].set()
        self._has_run[number] = True
        self._log("stage ready", stage=number, address=self.addresses[number], process=process.pid)
        watch = HangWatch(self._hang)
        while self._hang:
            await asyncio.sleep(watch.every)
            if self._stopping:
                break
            if why := watch.look(ledger.read()):
                return self._end(number, process, why)
        return ""

    def _end(self, number: int, process: Any, why: str) -> str:
        self._log("stage hangs", level="error", stage=number, process=process.pid, why=why)
        with suppress(ProcessLookupError):
            process.kill()
        return why

    async def struck(self, name: str, stage: int, seconds: float) -> str:
        """Return how a stage ended at work on a microbatch, or an empty text."""
        end = time.monotonic() + seconds
        noticed = min(end, time.monotonic() + _SECONDS_TO_NOTICE)
        while (self._is_at_work(name) and time.monotonic() < end) or (
            self._ready[stage].is_set() and time.monotonic() < noticed
        ):
            await asyncio.sleep(_LOOK)
        return next((how for text, how in self._struck if text == name), "")

    def _is_at_work(self, name: str) -> bool:
        """Whether a stage computes a microbatch, as if it had not been lost, or died of it and nobody knows yet."""
        return any(ledger is not None and name in ledger.read().names for ledger in self._ledgers)

    async def stop(self) -> None:
        """Tell all stages to stop, and end those that do not."""
        self._stopping = True
        running = [process for process in self.processes if process is not None and process.returncode is None]
        for process in running:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in running:
            try:
                async with asyncio.timeout(_SECONDS_TO_STOP):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._sockets.cleanup()


class RemoteStages(ServedStages):
    """Stages that others have started, on hosts; asked every second whether they can compute."""

    def __init__(self, addresses: Sequence[str], identities: Sequence[str], *, tls: Tls, log: EventLog) -> None:
        super().__init__(len(addresses))
        self.addresses = self.links = addresses
        self._identities = identities
        self._wrong: dict[int, str] = {}  # what another stage than expected said it was
        self._log, self._tls = log, tls
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Wait until all stages answer; LaunchError names those that do not."""
        self._log("waiting for stages", addresses=list(self.addresses), seconds=_SECONDS_TO_START)
        self._watching = [asyncio.create_task(self._watch(number)) for number in range(len(self.addresses))]
        end = time.monotonic() + _SECONDS_TO_START
        while not await self.back(0.2) and not self._wrong and time.monotonic() < end:
            continue
        if not self.are_ready:
            silent = [self.addresses[number] for number in self.down]
            await self.stop()
            for number, identity in self._wrong.items():
                raise LaunchError(
                    f"{self.addresses[number]} is {identity}",
                    expected=self._identities[number],
                    fix="name --hosts in the order of the stages, and give all the same exported folder",
                )
            raise LaunchError(
                f"no stage answers at {', '.join(silent)}",
                expected="`drumline serve DIR --stage K --listen HOST:PORT` running there",
            )

    async def struck(self, name: str, stage: int, seconds: float) -> str:
        """Say that any lost microbatch may have been computed: these stages have no ledger that the front can read."""
        return f"stage {stage}: the connection broke, and it may have been at work on this"

    async def _watch(self, number: int) -> None:
        async with connect(self.addresses[number], self._tls, 2**20) as channel:
            ask = stub(channel, "ServerMetadata")
            while True:
                try:
                    answer = await ask(message("ServerMetadataRequest")(), timeout=2.0)
                    self._heard(number, answer.name)
                except grpc.aio.AioRpcError as error:
                    if self._ready[number].is_set():
                        self._log("stage lost", level="error", stage=number, code=error.code().name)
                        self._ready[number].clear()
                await asyncio.sleep(1.0 if self._ready[number].is_set() else 0.1)

    def _heard(self, number: int, identity: str) -> None:
        """Take note of a stage that answers, if it is the right one."""
        if identity != self._identities[number]:
            if number not in self._wrong:
                self._log("wrong stage", level="error", address=self.addresses[number], found=identity)
            self._wrong[number] = identity
            self._ready[number].clear()
            return
        self._wrong.pop(number, None)
        if not self._ready[number].is_set():
            self._log("stage ready", stage=number, address=self.addresses[number])
            self._ready[number].set()

    async def stop(self) -> None:
        """Ask no more; the stages continue."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
