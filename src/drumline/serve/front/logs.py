"""Logs as lines of JSON on stderr: when, how bad, what, and for requests which."""

from __future__ import annotations

import json
import sys
import time
from typing import Any, TextIO


class EventLog:
    """Writes a line for each event.

    >>> EventLog(sys.stdout, clock=lambda: 0.0)("stage ended", level="error", stage=1)
    {"time": "1970-01-01T00:00:00.000Z", "level": "error", "event": "stage ended", "stage": 1}
    """

    def __init__(self, file: TextIO | None = None, *, requests: bool = False, clock: Any = time.time) -> None:
        self._file, self._clock = file, clock
        self.requests = requests  # whether every request gets a line, or only those that fail

    def __call__(self, event: str, *, level: str = "info", **fields: Any) -> None:
        """Write an event."""
        now = self._clock()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = json.dumps({"time": moment, "level": level, "event": event, **fields}, default=str)
        print(line, file=self._file or sys.stderr, flush=True)
