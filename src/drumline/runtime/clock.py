"""When things happen on a rank, by a clock that the ranks of one host share."""

from __future__ import annotations

import time

from drumline.runtime.draft import Draft


class Clock:
    """Host time, for devices whose work is done when the call returns."""

    def now(self) -> int:
        """Return this moment in nanoseconds."""
        return time.perf_counter_ns()

    def begin(self) -> None:
        """Start a step."""

    def start(self, directly: bool) -> int:
        """Mark the start of an action; `directly` says that it follows another without anything between."""
        return self.mark()

    def mark(self) -> int:
        """Mark the moment that the device's work so far is done; on a host that is now."""
        return time.perf_counter_ns()

    def settle(self, draft: Draft) -> None:
        """Turn marks into moments, once the step is over."""


class NoClock(Clock):
    """Stands still: for pipelines that record nothing."""

    def now(self) -> int:
        """Return no moment."""
        return 0

    def mark(self) -> int:
        """Mark nothing."""
        return 0
