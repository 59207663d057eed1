"""A rank's step, nanosecond by nanosecond: what it did, by spans of its own.

    compute    ███████            ██████████
    send              ██
    wait                 ███████                     for a message that was not made yet
    flight                      ███                  the same wait, once the message was on its way
    take                           ██
    overhead         █     █                         posting receives, taking notes, ...
    nothing                          █               no span says what the rank did: unexplained

On a host no two spans are at once. A device computes on its own, so that several may cover a moment: then the one that
stands higher here counts. Where a device stood still before an action that needed a message, without the host
knowing, it waited for that message.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from drumline.core.action import Action
from drumline.core.measured.record import OVERHEADS, Record, decoded

# Returns what this rank's clock showed when another rank's showed a moment: (that rank, moment).
Here = Callable[[int, int], int]


class Doing(StrEnum):
    """What a rank does."""

    COMPUTE = "compute"
    SEND = "send"
    TAKE = "take"
    WAIT = "wait"
    FLIGHT = "flight"
    EXCHANGE = "exchange"
    OVERHEAD = "overhead"
    LEAVE = "leave"  # the row has ended, and what was sent has not left
    STREAM_WAIT = "stream wait"  # of a device
    STREAM_FLIGHT = "stream flight"
    NOTHING = "nothing"


_ORDER = {doing: number for number, doing in enumerate(Doing)}
_LEAVE = OVERHEADS.index("leave")


class Piece(NamedTuple):
    """A time in which a rank did one thing, in nanoseconds of its own clock.

    `action` is the number of the timed action that it belongs to or comes before; `message` the receive that it is
    about and `other` the rank at its other end; `kind` is an overhead's.
    """

    start: int
    end: int
    doing: Doing
    action: int = -1
    message: Action | None = None
    other: int = -1
    kind: str = ""


def account(record: Record, here: Here) -> list[Piece]:
    """Return a rank's step as pieces without gaps, from its begin to its end.

    >>> record = Record(0, begin_ns=0, end_ns=100, starts=[20], ends=[90], overheads=[0, 0, 15])
    >>> [(piece.start, piece.end, str(piece.doing)) for piece in account(record, lambda rank, moment: moment)]
    [(0, 15, 'overhead'), (15, 20, 'nothing'), (20, 90, 'compute'), (90, 100, 'nothing')]
    """
    return list(_laid_out(_spans(record, here), record.begin_ns, record.end_ns))


def _spans(record: Record, here: Here) -> Iterator[Piece]:
    """Yield every span of a record, in any order."""
    for number, (start, end) in enumerate(zip(record.starts, record.ends, strict=True)):
        yield Piece(start, end, Doing.COMPUTE, number)
    messages = list(record.rows("messages"))
    for action, *coded, source, made, _, _, start, end, _ in messages:
        receive = decoded(*coded)
        yield Piece(start, end, Doing.TAKE, action, receive, source)
        if record.on_device and action < len(record.starts):
            free = record.ends[action - 1] if action else record.begin_ns
            yield from _until(here(source, made), free, record.starts[action], action, receive, source)
    for message, start, end in record.rows("waits"):
        action, *coded, source, made = messages[message][:6]
        yield from _until(here(source, made), start, end, action, decoded(*coded), source, on_host=True)
    for *coded, target, start, end, _ in record.rows("sends"):
        yield Piece(start, end, Doing.SEND, -1, decoded(*coded), target)
    for _, start, end in record.rows("exchanges"):
        yield Piece(start, end, Doing.EXCHANGE)
    for kind, start, end in record.rows("overheads"):
        doing = Doing.LEAVE if kind == _LEAVE else Doing.OVERHEAD
        yield Piece(start, end, doing, kind=OVERHEADS[kind])


def _until(
    made: int, start: int, end: int, action: int, receive: Action, source: int, *, on_host: bool = False
) -> Iterator[Piece]:
    """Yield a wait in two: until its message was made, and from then on."""
    made = min(max(made, start), end)
    wait, flight = (Doing.WAIT, Doing.FLIGHT) if on_host else (Doing.STREAM_WAIT, Doing.STREAM_FLIGHT)
    yield Piece(start, made, wait, action, receive, source)
    yield Piece(made, end, flight, action, receive, source)


def _laid_out(spans: Iterable[Piece], begin: int, end: int) -> Iterator[Piece]:
    """Yield pieces that follow each other from begin to end; of spans at the same time the one that comes first."""
    there = (span for span in spans if span.end > span.start and span.end > begin and span.start < end)
    ordered = sorted(there, key=lambda span: span.start)
    moments = sorted({begin, end, *(moment for span in ordered for moment in span[:2] if begin < moment < end)})
    under_way: list[tuple[int, int]] = []  # by what comes first; the number of the span
    upcoming = 0
    last: Piece | None = None
    for low, high in pairwise(moments):
        while upcoming < len(ordered) and ordered[upcoming].start <= low:
            heapq.heappush(under_way, (_ORDER[ordered[upcoming].doing], upcoming))
            upcoming += 1
        while under_way and ordered[under_way[0][1]].end <= low:
            heapq.heappop(under_way)
        found = ordered[under_way[0][1]] if under_way else Piece(low, high, Doing.NOTHING)
        if last is not None and last[2:] == found[2:]:
            last = last._replace(end=high)
            continue
        if last is not None:
            yield last
        last = found._replace(start=low, end=high)
    if last is not None:
        yield last
