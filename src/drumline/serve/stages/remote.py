"""Stages that others have started, on hosts: asked every second which export they are of, and if they can compute.

Each has a keeper on its host, which starts it again and reads its ledger. So the front asks the stages what became of a
microbatch that was lost. If a keeper is younger than the microbatch, nobody knows that.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from drumline.core.errors import LaunchError
from drumline.serve.logs import EventLog
from drumline.serve.stages.keeper import SECONDS_TO_START
from drumline.serve.stages.supervisor import ServedStages
from drumline.serve.wire.frames import EXPORT, SERVICE, STRUCK
from drumline.serve.wire.links import Tls, connect
from drumline.serve.wire.manifest import Manifest
from drumline.serve.wire.protocol import message, stub

_LOOK = 0.05  # seconds until stages that are still at work on a lost microbatch are asked again


def _age(asked: float) -> float:
    return time.monotonic() - asked


class RemoteStages(ServedStages):
    """Stages on hosts, by their addresses."""

    def __init__(
        self,
        addresses: Sequence[str],
        manifest: Manifest,
        *,
        tls: Tls,
        log: EventLog,
        restarted: Callable[[int], None] = lambda number: None,
    ) -> None:
        super().__init__([asyncio.Event() for _ in addresses])
        self.addresses = addresses
        self._manifest, self._restarted = manifest, restarted
        self._identities = [manifest.identity(number) for number in range(len(addresses))]
        self._restarts: dict[int, int] = {}
        self._states: dict[int, Callable[..., Awaitable[bytes]]] = {}
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

    async def struck(self, name: str, stage: int, *, seconds: float, asked: float) -> str:
        """Return how a stage ended at work on a microbatch; an empty text if none did; or that nobody knows."""
        unknown = f"stage {stage}: the connection broke, and it may have been at work on this"
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            asking = (self._state(number, name, left) for number in range(len(self.addresses)))
            states = [state for state in await asyncio.gather(*asking) if state]
            if how := next((str(state["how"]) for state in states if state["how"]), ""):
                return how
            if any(state["seconds"] < _age(asked) for state in states):
                return unknown
            if len(states) == len(self.addresses) and not any(state["at_work"] for state in states):
                return ""
            await asyncio.sleep(_LOOK)
        return unknown

    async def _state(self, number: int, name: str, seconds: float) -> dict[str, Any]:
        """Ask a stage what became of a microbatch; an empty answer if it is silent or of another export."""
        metadata = ((EXPORT, self._manifest.handshake(number)),)
        try:
            body = await self._states[number](name.encode(), timeout=seconds, wait_for_ready=True, metadata=metadata)
            return dict(json.loads(body))
        except (grpc.aio.AioRpcError, ValueError, KeyError):
            return {}

    async def _watch(self, number: int) -> None:
        async with connect(self.addresses[number], self._tls, 2**20) as channel:
            ask = stub(channel, "ServerMetadata")
            self._states[number] = channel.unary_unary(f"/{SERVICE}/{STRUCK}")
            while True:
                try:
                    answer = await ask(message("ServerMetadataRequest")(), timeout=2.0)
                    self._heard(number, answer.name, int(answer.version or 0))
                except grpc.aio.AioRpcError as error:
                    if self._ready[number].is_set():
                        self._log("stage lost", level="error", stage=number, code=error.code().name)
                        self._ready[number].clear()
                await asyncio.sleep(1.0 if self._ready[number].is_set() else 0.1)

    def _heard(self, number: int, identity: str, restarts: int) -> None:
        """Take note of a stage that answers, if it is the right one."""
        if identity != self._identities[number]:
            if number not in self._wrong:
                self._log("wrong stage", level="error", address=self.addresses[number], found=identity)
            self._wrong[number] = identity
            self._ready[number].clear()
            return
        self._wrong.pop(number, None)
        for _ in range(self._restarts.get(number, restarts), restarts):
            self._log("stage ended", level="error", stage=number, address=self.addresses[number])
            self._restarted(number)
        self._restarts[number] = restarts
        if not self._ready[number].is_set():
            self._log("stage ready", stage=number, address=self.addresses[number])
            self._ready[number].set()

    async def stop(self) -> None:
        """Ask no more; the stages continue."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
