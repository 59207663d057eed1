"""The clock of each kind of device: on CUDA, times are measured on the device itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drumline.runtime.draft import Clock, Draft

# Age at which an anchor is renewed: until then the time since it is known to a tenth of a microsecond.
_ANCHOR_NS = 1_000_000_000


class _Anchor:
    """An event, and the host's time at which the device passed it.

    If the device was idle, that is the time of recording, except for the microseconds of a launch. Otherwise it is
    computed from the previous anchor. Anchors are renewed, because an event's time is a 32-bit number.
    """

    def __init__(self, event: Any, moment_ns: int, before: _Anchor | None = None) -> None:
        self.event = event
        self.recorded_ns = moment_ns
        self._moment_ns = moment_ns
        self._before = before

    def moment(self, event: Any) -> int:
        """Return when the device passed an event."""
        if self._before is not None:
            self._moment_ns, self._before = self._before.moment(self.event), None
        return self._moment_ns + int(self.event.elapsed_time(event) * 1e6)


@dataclass(slots=True)
class _Marks:
    """The events of one step."""

    events: list[Any]
    anchor: _Anchor
    num_used: int = 0
    is_settled: bool = False

    @property
    def last(self) -> Any:
        """The event that the device passes last."""
        return self.events[self.num_used - 1] if self.num_used else self.anchor.event


class EventClock(Clock):
    """Marks moments on the device's stream; they become times when the device has passed them.

    ::

        begin ── is the device idle? ──► anchor: an event that it passes right now
        mark ─── an event on the stream; no request waits for it
        settle ─ has it passed the last one? then every mark is the anchor's time plus the time since
    """

    def __init__(self) -> None:
        self._free: list[list[Any]] = []  # events of settled steps
        self._marks: _Marks | None = None  # of the current step

    def begin(self, draft: Draft) -> None:
        """Start a step: if the device is idle, the first event relates its clock to the host's."""
        self._stream = torch.cuda.current_stream()
        before = self._marks
        anchor = self._anchor(None if before is None else before.anchor)
        if before is not None and before.is_settled:
            self._free.append(before.events)
        self._marks = draft.marks = _Marks(self._free.pop() if self._free else [], anchor)
        draft.on_device = 1

    def _anchor(self, before: _Anchor | None) -> _Anchor:
        if before is None:
            self._stream.synchronize()  # once, before the first step
        is_idle = self._stream.query()
        if before is not None and not is_idle and self.now() - before.recorded_ns < _ANCHOR_NS:
            return before
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _Anchor(event, self.now(), None if is_idle else before)

    def start(self, directly: bool) -> int:
        """Mark the start of an action, using the end of the previous one if it follows directly."""
        assert self._marks is not None
        return self._marks.num_used - 1 if directly and self._marks.num_used else self.mark()

    def mark(self) -> int:
        """Mark the moment when the device's work so far is done; return the mark's number."""
        marks = self._marks
        assert marks is not None
        if marks.num_used == len(marks.events):
            marks.events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        marks.events[marks.num_used].record(self._stream)
        marks.num_used += 1
        return marks.num_used - 1

    def settle(self, draft: Draft, *, wait: bool) -> bool:
        """Turn marks into times if the device has passed them; wait only for the draft's own marks."""
        marks = draft.marks
        if marks is None:
            return True
        if not marks.last.query():
            if not wait:
                return False
            marks.last.synchronize()
        moments = [marks.anchor.moment(event) for event in marks.events[: marks.num_used]]
        draft.starts = [moments[mark] for mark in draft.starts]
        draft.ends = [moments[mark] for mark in draft.ends]
        draft.end_ns = max(draft.end_ns, *draft.ends) if draft.ends else draft.end_ns
        draft.marks, marks.is_settled = None, True
        if self._marks is not marks:
            self._free.append(marks.events)
        return True


def device_name(device: torch.device) -> str:
    """Return the name of a device; an empty text for the host.

    >>> device_name(torch.device("cpu"))
    ''
    """
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if device.type == "cpu" or named is None else str(named(device))


def clock_for(device: torch.device) -> Clock:
    """Return the clock that measures a device's times."""
    return EventClock() if device.type == "cuda" else Clock()
