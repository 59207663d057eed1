"""Stages that others have started, on hosts: asked every second which export they are of, and if they can compute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc

from drumline.core.errors import LaunchError
from drumline.serve.logs import EventLog
from drumline.serve.stages.keeper import SECONDS_TO_START
from drumline.serve.stages.supervisor import ServedStages
from drumline.serve.wire.links import Tls, connect
from drumline.serve.wire.protocol import message, stub


class RemoteStages(ServedStages):
    """Stages that others have started, on hosts; asked every second whether they can compute."""

    def __init__(self, addresses: Sequence[str], identities: Sequence[str], *, tls: Tls, log: EventLog) -> None:
        super().__init__([asyncio.Event() for _ in addresses])
        self.addresses = addresses
        self._identities = identities
        self._wrong: dict[int, str] = {}  # what another stage than expected said it was
        self._log, self._tls = log, tls

    async def start(self) -> None:
        """Wait until all stages answer; LaunchError names those that do not."""
        self._log("waiting for stages", addresses=list(self.addresses), seconds=SECONDS_TO_START)
        self._watching = [asyncio.create_task(self._watch(number)) for number in range(len(self.addresses))]
        end = time.monotonic() + SECONDS_TO_START
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
