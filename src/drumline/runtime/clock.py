"""When things happen on a rank, by a clock of its own; `core/measured/align` puts all ranks on one."""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from functools import cache
from pathlib import Path

from drumline.runtime.draft import Draft


@cache
def _host_clock() -> int:
    """Return a number that is equal for processes whose clocks show the same: one boot, one time namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/time").st_ino if os.path.exists("/proc/self/ns/time") else 0
    except OSError:
        return secrets.randbits(48)
    return int.from_bytes(hashlib.sha256(f"{boot}/{space}".encode()).digest()[:6])


class Clock:
    """Host time, for devices whose work is done when the call returns."""

    @property
    def number(self) -> int:
        """Which clock this is: clocks with the same number show the same."""
        return _host_clock()

    def now(self) -> int:
        """Return this moment in nanoseconds."""
        return time.perf_counter_ns()

    def begin(self, draft: Draft) -> None:
        """Start a step, whose marks belong to the draft."""

    def start(self, directly: bool) -> int:
        """Mark the start of an action; `directly` says that it follows another without anything between."""
        return self.mark()

    def mark(self) -> int:
        """Mark the moment that the device's work so far is done; on a host that is now."""
        return self.now()

    def settle(self, draft: Draft, *, wait: bool) -> bool:
        """Turn marks into moments once the device has passed them; return whether it has. Waits for it if asked to."""
        return True


class NoClock(Clock):
    """Stands still: for pipelines that record nothing."""

    def now(self) -> int:
        """Return no moment."""
        return 0
