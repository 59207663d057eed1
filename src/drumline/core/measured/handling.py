"""What a step takes beside computing, as it was measured, and what that makes of a prediction.

    rank 0    0F0 │note│send│                        the sender copies a message, and goes on
    rank 1              wait      │flight│take│ 1F0  the receiver wakes up and copies it, before it computes

A rank cannot compute while it copies, so copying is part of the action that makes or needs the message, and so is the
executor's own work for every action. Only the flight is latency, which occupies nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median

from drumline.core.action import RECV_OPS
from drumline.core.measured.account import NANO
from drumline.core.measured.measured import Measured
from drumline.core.measured.record import OVERHEADS, RECEIVES, Record

_BEGIN, _END = OVERHEADS.index("begin"), OVERHEADS.index("end")


@dataclass(frozen=True, slots=True)
class Handling:
    """Seconds to send a message, to wake up for it, to take it, for any action, and to begin and end a step."""

    send: float = 0.0
    flight: float = 0.0
    take: float = 0.0
    action: float = 0.0
    begin: float = 0.0
    end: float = 0.0

    @staticmethod
    def measured(timelines: Sequence[Measured]) -> Handling:
        """Return the medians over steps that ran, of all their messages and actions."""
        seen: dict[str, list[float]] = {one.name: [] for one in fields(Handling)}
        for timeline in timelines:
            for record, parts in zip(timeline.records, timeline.parts, strict=True):
                begin, end = (_overhead(record, kind) for kind in (_BEGIN, _END))
                own = (parts.overhead + parts.unexplained) / NANO - begin - end
                seen["send"] += [to - since for *_, since, to, _ in record.rows("sends")]
                seen["flight"] += _flights(timeline, record.rank)
                seen["take"] += [to - since for *_, since, to, _ in record.rows("messages")]
                seen["action"].append(own / len(record.starts))
                seen["begin"].append(begin)
                seen["end"].append(end)
        return Handling(**{name: median(each) * NANO for name, each in seen.items() if each})


def ends_of(timeline: Measured) -> list[float]:
    """Return, rank by rank, the seconds in which a step ended: its gradients were looked at."""
    return [_overhead(record, _END) * NANO for record in timeline.records]


def _overhead(record: Record, kind: int) -> int:
    return sum(end - start for one, start, end in record.rows("overheads") if one == kind)


def _flights(timeline: Measured, rank: int) -> list[int]:
    """Return how long each message took that the rank waited for, from when it had left to when it was taken."""
    record = timeline.records[rank]
    messages = list(record.rows("messages"))
    found = []
    for number, start, _ in record.rows("waits"):
        _, _, op, _, source, made, sent, _, taken, _, _ = messages[number]
        if RECEIVES[op] in RECV_OPS and timeline.here(rank, source, made) > start:
            found.append(max(taken - timeline.here(rank, source, sent), 0))
    return found
