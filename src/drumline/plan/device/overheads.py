"""The time of a step besides compute, for messages of any size: handling that was measured at some sizes.

    rank 0    0F0 │own│send│                     the executor's own work, and copying the message out
    rank 1             │flight│take│ 1F0 │own│   waking up, which occupies no rank, and copying it in

A rank cannot compute while it copies, so the copy belongs to the action that makes or needs the message. At the end of
a step a rank checks its gradients, which takes longer with more gradients. Seconds that grow with bytes are a
`MessageTime`: a latency and a bandwidth, fitted to the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from drumline.core.errors import PlanError
from drumline.core.graph import Floats
from drumline.core.measured.costs import Handling
from drumline.core.parsed import LARGEST, Parsed

Numbers = TypeVar("Numbers", float, Floats)


@dataclass(frozen=True, slots=True)
class MessageTime:
    """`seconds` for an empty message, plus `seconds_per_byte` for each byte.

    >>> MessageTime(1.0, 0.5).at(4)
    3.0
    """

    seconds: float = 0.0
    seconds_per_byte: float = 0.0

    def at(self, num_bytes: Numbers) -> Numbers:
        """Return the seconds for this many bytes."""
        return self.seconds + self.seconds_per_byte * num_bytes

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth; infinite if more bytes take no longer."""
        return 1 / self.seconds_per_byte if self.seconds_per_byte > 0 else math.inf


def fitted(points: Sequence[tuple[float, float]]) -> MessageTime:
    """Return the least-squares line through (bytes, seconds), with errors relative to the seconds.

    Neither latency nor bandwidth is ever negative: if the best line has a negative one, it is fixed at 0.

    >>> line = fitted([(0, 2e-5), (1000, 3e-5), (2000, 4e-5)])
    >>> round(line.seconds * 1e6, 3), round(line.bytes_per_second / 1e6, 3)
    (20.0, 100.0)
    """
    if not points:
        raise PlanError("no message was measured", expected="(bytes, seconds) of one message or more")
    size, seconds = (np.array(column, dtype=float) for column in zip(*points, strict=True))
    weight = 1 / np.maximum(seconds, 1e-12)  # a microsecond matters more in a short message than in a long one
    if len(set(size.tolist())) > 1:
        columns = np.stack([weight, weight * size / size.max()], axis=1)
        (latency, slope), *_ = np.linalg.lstsq(columns, weight * seconds, rcond=None)
        slope = slope / size.max()
        if latency >= 0 and slope >= 0:
            return MessageTime(float(latency), float(slope))
        if slope >= 0:
            return MessageTime(0.0, float((weight**2 * size * seconds).sum() / (weight**2 * size * size).sum()))
    return MessageTime(float((weight**2 * seconds).sum() / (weight**2).sum()), 0.0)


_NOTHING = MessageTime()
_LINES = ("send", "take", "end")


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds to `send` and `take` a message of a given size, of its `flight`, per `action`, and to `begin` a step.

    `end` depends on a rank's bytes of gradients.
    """

    send: MessageTime = _NOTHING
    take: MessageTime = _NOTHING
    end: MessageTime = _NOTHING
    flight: float = 0.0
    action: float = 0.0
    begin: float = 0.0

    @staticmethod
    def fitted(measured: Sequence[tuple[float, Handling]], ends: Sequence[tuple[float, float]]) -> Overheads:
        """Fit the handling of messages of some sizes, and the ends of steps with some bytes of gradients.

        >>> samples = [(0.0, Handling(send=1.0, action=0.5)), (10.0, Handling(send=2.0, action=0.5))]
        >>> overheads = Overheads.fitted(samples, [(0.0, 1.0)])
        >>> round(overheads.send.at(20.0), 9), overheads.action
        (3.0, 0.5)
        """
        middle = {
            name: sorted(getattr(handling, name) for _, handling in measured)[len(measured) // 2]
            for name in ("flight", "action", "begin")
        }
        send, take = (fitted([(size, getattr(h, name)) for size, h in measured]) for name in ("send", "take"))
        return Overheads(send, take, fitted(ends), **middle)

    def to_json(self) -> dict[str, Any]:
        """Return the overheads as a JSON object."""
        table = {field.name: getattr(self, field.name) for field in fields(self)}
        return table | {name: [table[name].seconds, table[name].seconds_per_byte] for name in _LINES}

    @staticmethod
    def from_json(table: Parsed) -> Overheads:
        """Read the overheads from the object that `to_json` returned.

        >>> from drumline.core.errors import PlanError
        >>> from drumline.core.files import FileKind
        >>> value = Overheads(send=MessageTime(1.0, 0.5), action=0.25)
        >>> Overheads.from_json(Parsed(value.to_json(), FileKind("profile", PlanError, "a profile"))) == value
        True
        """
        table.only(field.name for field in fields(Overheads))
        send, take, end = (_line_from(table[name]) for name in _LINES)
        # The rest of a step, divided among its actions, may be negative.
        action = table["action"].number(-LARGEST)
        return Overheads(send, take, end, table["flight"].number(), action, table["begin"].number())


def _line_from(pair: Parsed) -> MessageTime:
    if len(pair.each()) != 2:
        raise pair.refuse("seconds, and seconds per byte")
    seconds, slope = pair.each()
    return MessageTime(seconds.number(), slope.number())
