"""Stages as processes of this machine: each has a keeper, which starts it again if it ends or hangs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from drumline.core.errors import LaunchError
from drumline.serve.logs import EventLog
from drumline.serve.stages.home import ModelHome
from drumline.serve.stages.keeper import SECONDS_TO_START, StageKeeper
from drumline.serve.wire.links import LOOPBACK, free_port, local_links
from drumline.serve.wire.manifest import Manifest

_SECONDS_TO_NOTICE = 1.0  # that a stage has ended, after the connection to it broke
_LOOK = 0.01  # seconds until a stage that is still at work on a lost microbatch is looked at again


class ServedStages:
    """The stages behind a front: where they are, and whether all of them can compute."""

    addresses: Sequence[str]

    def __init__(self, ready: Sequence[asyncio.Event]) -> None:
        self._ready = ready
        self._watching: list[asyncio.Task[None]] = []

    @property
    def are_ready(self) -> bool:
        """Whether every stage can compute."""
        return all(event.is_set() for event in self._ready)

    @property
    def are_watched(self) -> bool:
        """Whether somebody looks after every stage, and can."""
        return not any(task.done() for task in self._watching)

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

    async def struck(self, name: str, stage: int, *, seconds: float, asked: float) -> str:
        """Return why a microbatch that a stage lost must not be sent again, or an empty text.

        It was sent at the moment `asked`. Waits at most so long while a stage is still at work on it.
        """
        raise NotImplementedError

    async def start(self) -> None:
        """Start what has to be started, and wait until all stages can compute."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop what was started."""
        raise NotImplementedError


class LocalStages(ServedStages):
    """One process for each stage, on sockets of this user; on ports of the loopback interface where there are none.

    They serve a copy of the folder, which nobody replaces.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        threads: int,
        limit: int,
        max_bytes: int,
        log: EventLog,
        restarted: Callable[[int], None],
        hang: float = 0.0,
        cores: Sequence[Sequence[int]] = (),
        message_cores: Sequence[int] = (),
    ) -> None:
        count = len(manifest.stages)
        self._folder, self._manifest, self._home = folder, manifest, ModelHome()
        self.addresses = local_links(self._home.path, count) or [f"{LOOPBACK}:{free_port()}" for _ in range(count)]
        alike = {"threads": threads, "limit": limit, "max_bytes": max_bytes, "export": manifest.digest}
        self._keepers = [
            StageKeeper(
                {
                    **alike,
                    "folder": str(self._home.export),
                    "number": number,
                    "address": self.addresses[number],
                    "following": self.addresses[number + 1] if number + 1 < count else "",
                    "cores": list(cores[number]) if cores else [],
                    "message_cores": list(message_cores),
                },
                self._home.path,
                log=log,
                hang=hang,
                restarted=partial(restarted, number),
            )
            for number in range(count)
        ]
        super().__init__([keeper.ready for keeper in self._keepers])

    @property
    def processes(self) -> list[Any]:
        """The processes of the stages."""
        return [keeper.process for keeper in self._keepers]

    @property
    def are_watched(self) -> bool:
        """Whether every stage has a keeper that can start it."""
        return super().are_watched and all(keeper.is_able for keeper in self._keepers)

    async def start(self) -> None:
        """Start all stages at once; LaunchError if one ends instead of getting ready."""
        await asyncio.to_thread(self._home.hold, self._folder, self._manifest)
        self._watching = [asyncio.create_task(keeper.keep()) for keeper in self._keepers]
        ready = asyncio.create_task(self.back(SECONDS_TO_START))
        done, _ = await asyncio.wait({ready, *self._watching}, return_when=asyncio.FIRST_COMPLETED)
        if ready not in done or not self.are_ready:
            ready.cancel()
            failed = [task.exception() for task in self._watching if task.done() and not task.cancelled()]
            await self.stop()
            raise next((error for error in failed if error is not None), None) or LaunchError(
                f"the stages were not ready within {SECONDS_TO_START:g} seconds"
            )

    async def struck(self, name: str, stage: int, *, seconds: float, asked: float) -> str:
        """Return how a stage ended at work on a microbatch, or an empty text."""
        end = time.monotonic() + seconds
        noticed = min(end, time.monotonic() + _SECONDS_TO_NOTICE)
        while (any(keeper.is_at_work(name) for keeper in self._keepers) and time.monotonic() < end) or (
            self._ready[stage].is_set() and time.monotonic() < noticed
        ):
            await asyncio.sleep(_LOOK)
        return next((how for keeper in self._keepers for text, how in keeper.struck if text == name), "")

    async def stop(self) -> None:
        """Tell all stages to stop, and end those that do not."""
        for keeper in self._keepers:
            keeper.stop()
        for keeper in self._keepers:
            await keeper.stopped()
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._home.remove()
