"""A record in the making: what a rank notes while it goes through a step."""

from __future__ import annotations

from array import array

from drumline.core.action import Action
from drumline.core.record import COLUMNS, Record, coded
from drumline.runtime.channel import Delivery


class Draft:
    """One rank's notes on one step; `starts` and `ends` may be marks of a device's clock until they are settled."""

    def __init__(self, rank: int, step: int = 0) -> None:
        self.rank = rank
        self.step = step
        self.begin_ns = 0
        self.end_ns = 0
        self.peak_stash = 0
        self.starts = array("q")
        self.ends = array("q")
        self.held = array("q")
        self.stash = array("q")
        self.waits = array("q")
        self.messages = array("q")
        self.sends = array("q")
        self.exchanges = array("q")

    def waited(self, receive: Action, source: int, start: int, end: int) -> None:
        """Note a wait before the next timed action."""
        self.waits.extend((len(self.starts), *coded(receive), source, start, end))

    def took(self, receive: Action, source: int, delivery: Delivery, start: int, end: int) -> None:
        """Note a message that was copied out."""
        made, sent, arrived = delivery.made_ns, delivery.sent_ns, min(delivery.arrived_ns, start)
        self.messages.extend((*coded(receive), source, made, sent, arrived, start, end, delivery.num_bytes))

    def sent(self, receive: Action, target: int, num_bytes: int, start: int, end: int) -> None:
        """Note a message that was handed over."""
        self.sends.extend((*coded(receive), target, start, end, num_bytes))

    def record(self) -> Record:
        """Return the record."""
        plain = (self.rank, self.step, self.begin_ns, self.end_ns, self.peak_stash)
        return Record(*plain, **{name: getattr(self, name) for name in COLUMNS})
