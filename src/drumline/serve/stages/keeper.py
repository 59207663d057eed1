"""The process of one stage: started, watched, started again if it ends, hangs, or could not be started.

A stage's ledger says on which microbatches it was at work when it ended. Those are not sent again: one of them may be
why it ended. Where the system gives no process, no descriptor or no disk space, a keeper tries again until it does.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from drumline.core.errors import LaunchError
from drumline.serve.ledger import Ledger
from drumline.serve.logs import QUIET, EventLog
from drumline.serve.stages.hang import HangWatch

SECONDS_TO_START = 120.0
_SECONDS_TO_STOP = 8.0
_QUICK_END = 5.0  # a stage that ends sooner than this after its start waits before the next one
_LONGEST_PAUSE = 2.0
_MOST_STRUCK = 1000  # microbatches to remember
_MOST_TOLD = 200  # of them, to a stage that is started again
_MOST_FAILED_STARTS = 5  # in a row; from then on the service is not alive


class StageKeeper:
    """Keeps a stage running, by the arguments of `run_stage` and a folder for its ledger."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        home: Path,
        *,
        log: EventLog,
        hang: float = 0.0,
        restarted: Callable[[], None] = lambda: None,
    ) -> None:
        self.number: int = arguments["number"]
        self.ready = asyncio.Event()
        self.process: Any = None
        self.struck: deque[tuple[str, str]] = deque(maxlen=_MOST_STRUCK)  # microbatches, and how their stage ended
        self._arguments, self._home = arguments, home
        self._log, self._hang, self._restarted = log, hang, restarted
        self._ledger: Ledger | None = None
        self._failed_starts = self._restarts = 0
        self._since = time.monotonic()
        self._has_run = self._stopping = False

    @property
    def is_able(self) -> bool:
        """Whether its stage can be started, as far as is known."""
        return self._failed_starts < _MOST_FAILED_STARTS

    async def keep(self) -> None:
        """Start the stage, wait for its end, start it again; LaunchError if it never gets ready."""
        pause = 0.0
        while not self._stopping:
            began = time.monotonic()
            try:
                await self._watched(await self._started())
            except (OSError, RuntimeError) as error:  # RuntimeError: no more threads
                self._not_started(error)
            if self._stopping:
                return
            quick = time.monotonic() - began < _QUICK_END
            pause = min(max(2 * pause, 0.1), _LONGEST_PAUSE) if quick else 0.0
            await asyncio.sleep(pause)

    def _not_started(self, error: Exception) -> None:
        if not self._has_run:
            raise LaunchError(f"cannot start stage {self.number}: {error}") from None
        self._failed_starts += 1
        self._log("stage not started", level="error", stage=self.number, why=str(error))

    async def _started(self) -> Any:
        path = self._home / f"ledger{self.number}"
        self._ledger = Ledger.create(path)
        past = {"since": self._since, "restarts": self._restarts, "struck": list(self.struck)[-_MOST_TOLD:]}
        arguments = {**self._arguments, "ledger": str(path), "home": str(self._home), "past": past}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "drumline.serve.stage", json.dumps(arguments),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            env={**QUIET, **os.environ},
        )  # fmt: skip
        return self.process

    async def _watched(self, process: Any) -> None:
        """Wait until a stage ends, and note what it was at work on."""
        ledger = self._ledger
        assert ledger is not None
        watching = asyncio.create_task(self._hangs(process, ledger))
        try:
            code = await process.wait()
        finally:
            was_ready = self.ready.is_set()
            self.ready.clear()
            watching.cancel()
        hung = watching.result() if watching.done() and not watching.cancelled() else ""
        # Together, without a wait: a microbatch is in a ledger that is read, or among those that were struck.
        how = f"it hung and was ended ({hung})" if hung else f"it ended with code {code}"
        self.struck += [(name, f"stage {self.number}: {how}, at work on this") for name in ledger.read().names]
        self._ledger = None
        if self._stopping:
            return
        if not self._has_run:
            raise LaunchError(
                f"stage {self.number} ended with code {code} before it was ready", fix="see its error above"
            )
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        self._log("stage ended", level="error", stage=self.number, code=code)
        self._restarts += 1
        self._restarted()

    async def _hangs(self, process: Any, ledger: Ledger) -> str:
        """Wait until a stage is ready, and then end it if it hangs; returns why it was ended."""
        try:
            async with asyncio.timeout(SECONDS_TO_START if self._has_run else None):
                is_ready = await process.stdout.readline() == b"ready\n"
        except TimeoutError:
            return self._end(process, f"it was not ready within {SECONDS_TO_START:g} seconds")
        if not is_ready:
            return ""  # it has ended, and said why
        self.ready.set()
        self._has_run, self._failed_starts = True, 0
        self._log("stage ready", stage=self.number, address=self._arguments["address"], process=process.pid)
        watch = HangWatch(self._hang)
        while self._hang:
            await asyncio.sleep(watch.every)
            if self._stopping:
                break
            if why := watch.look(ledger.read()):
                return self._end(process, why)
        return ""

    def _end(self, process: Any, why: str) -> str:
        self._log("stage hangs", level="error", stage=self.number, process=process.pid, why=why)
        with suppress(ProcessLookupError):
            process.kill()
        return why

    def is_at_work(self, name: str) -> bool:
        """Whether the stage computes a microbatch, as if it had not been lost, or died of it and nobody knows yet."""
        return self._ledger is not None and name in self._ledger.read().names

    def stop(self) -> None:
        """Tell the stage to stop."""
        self._stopping = True
        if self.process is not None and self.process.returncode is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    async def stopped(self) -> None:
        """Wait until it has stopped; end it if it does not."""
        if self.process is None or self.process.returncode is not None:
            return
        try:
            async with asyncio.timeout(_SECONDS_TO_STOP):
                await self.process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()
