"""Logs as lines of JSON on stderr: when, how bad, what, and for requests which.

A thread writes them. If nobody reads the other end, it waits there and the service does not: lines beyond a bound are
left out, and counted in the next one. What a closed pipe or a full disk does not take is lost.

Libraries write to stderr as well, and would wait there. What Python's logging has of theirs goes the same way; gRPC's
core, which has a log of its own, is told to write none (`QUIET`).
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import Empty, Full, Queue
from threading import Lock, Thread
from typing import Any, TextIO

QUIET = {"GRPC_VERBOSITY": "NONE"}  # in the environment, before gRPC is imported
_LIBRARIES = "grpc", "asyncio"
_MOST_LINES = 10_000
_MOST_TEXT = 2000  # characters of what a library says
_SECONDS_TO_CLOSE = 1.0


class EventLog:
    """Writes a line for each event.

    >>> log = EventLog(sys.stdout, clock=lambda: 0.0)
    >>> log("stage ended", level="error", stage=1); log.close()
    {"time": "1970-01-01T00:00:00.000Z", "level": "error", "event": "stage ended", "stage": 1}
    """

    def __init__(self, file: TextIO | None = None, *, requests: bool = False, clock: Any = time.time) -> None:
        self._file, self._clock = file, clock
        self.requests = requests  # whether every request gets a line, or only those that fail
        self._lines: Queue[str | None] = Queue(_MOST_LINES)
        self._left_out = 0
        self._lock = Lock()
        self._thread: Thread | None = None

    def __call__(self, event: str, *, level: str = "info", **fields: Any) -> None:
        """Have an event written soon; never waits, never raises."""
        now = self._clock()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        if self._left_out:
            fields["lines_left_out"] = self._left_out
        line = json.dumps({"time": moment, "level": level, "event": event, **fields}, default=str)
        try:
            self._lines.put_nowait(line + "\n")
        except Full:
            self._left_out += 1
            return
        self._left_out = 0
        self._begin()

    def _begin(self) -> None:
        with self._lock, suppress(RuntimeError):  # no thread to be had now: the next line asks again
            if self._thread is None or not self._thread.is_alive():
                thread = Thread(target=self._write, name="log", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Wait until all lines are written, for a moment: nobody may read them."""
        with suppress(Full):
            self._lines.put_nowait(None)
        if self._thread is not None:
            self._thread.join(_SECONDS_TO_CLOSE)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            # Several lines at once; what comes behind the last is taken the next time.
            more = [line]
            with suppress(Empty):
                while len(more) < 100 and (line := self._lines.get_nowait()) is not None:
                    more.append(line)
            with suppress(OSError, ValueError):  # ValueError: the file was closed
                _put("".join(more), self._file or sys.stderr)
            if line is None:
                return


class _Handed(logging.Handler):
    """Hands what a library logs to an event log."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        self._log("unexpected", level=record.levelname.lower(), why=self.format(record)[-_MOST_TEXT:])


@contextmanager
def with_libraries(log: EventLog) -> Iterator[None]:
    """Have what gRPC and asyncio log written as events, among them what nobody caught in an event loop.

    >>> log = EventLog(sys.stdout, clock=lambda: 0.0)
    >>> with with_libraries(log):
    ...     logging.getLogger("grpc.aio").warning("odd"); log.close()
    {"time": "1970-01-01T00:00:00.000Z", "level": "warning", "event": "unexpected", "why": "odd"}
    """
    loggers, handler = [logging.getLogger(name) for name in _LIBRARIES], _Handed(log)
    for logger in loggers:
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _put(text: str, file: TextIO) -> None:
    """Write a text, past the file's buffer: whoever else writes there must not wait for its lock."""
    try:
        number = file.fileno()
    except (io.UnsupportedOperation, AttributeError):
        file.write(text)
        file.flush()
        return
    data = text.encode()
    while data:
        try:
            data = data[os.write(number, data) :]
        except BlockingIOError:
            select.select([], [number], [])
