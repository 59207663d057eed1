"""A record in progress: what a rank does during a step, and when, by its own clock.

`core/measured/align` converts the clocks of all ranks to one.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from drumline.channel.channel import Delivery
from drumline.core.action import Action
from drumline.core.measured.record import COLUMNS, OVERHEADS, Record, coded

BEGIN, POST, NOTE, LEAVE, END = range(OVERHEADS.index("end") + 1)
_MESSAGE_WIDTH = len(COLUMNS["messages"])
_FIELDS = [field.name for field in fields(Record)]


class Draft:
    """One rank's notes on one step; `starts` and `ends` may be marks of a device's clock until they are settled."""

    def __init__(self, rank: int, step: int = 0) -> None:
        self.rank = rank
        self.step = step
        self.since_ns = 0
        self.begin_ns = 0
        self.end_ns = 0
        self.marks: Any = None  # of a device's clock, for unsettled starts and ends
        self.clock = 0
        self.on_device = 0
        self.program = 0
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.held: list[int] = []
        self.versions: list[int] = []
        self.stash: list[int] = []
        self.peaks: list[int] = []
        self.waits: list[int] = []
        self.messages: list[int] = []
        self.sends: list[int] = []
        self.exchanges: list[int] = []
        self.overheads: list[int] = []
        self.between: list[int] = []
        self.heard: list[int] = []

    def waited(self, start: int, end: int) -> None:
        """Record a wait for the message that is taken next."""
        self.waits.extend((len(self.messages) // _MESSAGE_WIDTH, start, end))

    def took(self, receive: Action, source: int, delivery: Delivery, start: int, end: int) -> None:
        """Record that a message was taken; if it arrived after the request, taking begins at its arrival."""
        start = max(start, min(delivery.arrived_ns, end))
        made_ns, sent, arrived = delivery.made_ns, delivery.sent_ns, min(delivery.arrived_ns, start)
        what = (len(self.starts), *coded(receive), source)
        self.messages.extend((*what, made_ns, sent, arrived, start, end, delivery.num_bytes))

    def sent(self, receive: Action, target: int, num_bytes: int, start: int, end: int) -> None:
        """Record that a message was sent."""
        self.sends.extend((*coded(receive), target, start, end, num_bytes))

    def renumber(self, table: str, microbatch: int) -> None:
        """Give the last message of `messages` or `sends` another microbatch: the one that the step's program has.

        >>> draft = Draft(0)
        >>> draft.sent(Action.parse("1RECV_F0"), 1, num_bytes=8, start=20, end=30)
        >>> draft.renumber("sends", 4); draft.sends
        [1, 0, 4, 1, 20, 30, 8]
        """
        columns, flat = COLUMNS[table], getattr(self, table)
        flat[columns.index("microbatch") - len(columns)] = microbatch

    def spent(self, kind: int, start: int, end: int) -> None:
        """Record overhead."""
        self.overheads.extend((kind, start, end))

    def record(self) -> Record:
        """Return the record."""
        return Record(**{name: getattr(self, name) for name in _FIELDS})


@cache
def _host_clock() -> int:
    """Return a number that is the same for processes that share a clock: one boot, one time namespace."""
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
        """The number of this clock: clocks with the same number show the same time."""
        return _host_clock()

    now: Callable[[], int] = staticmethod(time.perf_counter_ns)  # in nanoseconds, by a call that costs little

    def begin(self, draft: Draft) -> None:
        """Start a step, whose marks belong to the draft."""

    def start(self, directly: bool) -> int:
        """Mark the start of an action; `directly` if it follows another with nothing in between."""
        return self.mark()

    def mark(self) -> int:
        """Mark the moment when the device's work so far is done; on a host, now."""
        return self.now()

    def settle(self, draft: Draft, *, wait: bool) -> bool:
        """Turn marks into times if the device has passed them, waiting if `wait`; return whether it has."""
        return True


class NoClock(Clock):
    """Always zero, for pipelines that record nothing."""

    now: Callable[[], int] = staticmethod(int)
    mark: Callable[[], int] = staticmethod(int)

    def start(self, directly: bool) -> int:
        """Return 0."""
        return 0
