"""When things happen on a rank, by a clock of its own; `core/align` says what other ranks' clocks showed then."""

from __future__ import annotations

import time

from drumline.runtime.draft import Draft


class Clock:
    """Host time, for devices whose work is done when the call returns."""

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
