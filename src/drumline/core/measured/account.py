"""Account for every nanosecond of a rank's step.

    compute    ███████            ██████████
    send              ██
    wait                 ███████                     for a message that did not exist yet
    flight                      ███                  the same wait, while the message is on its way
    take                           ██
    overhead         █     █                         posting receives, writing records, ...
    nothing                          █               no span says what the rank did: unexplained

On a host, spans never overlap. A device computes on its own, so several spans may cover a moment; the one listed higher
here wins. If a device stood still before an action that needed a message, and the host did not know, it waited for that
message.

The spans add up to the parts of the step: compute, transfer, waiting, overhead, and a rest. They also give the cause of
every idle second. Drumline reads that cause from the rank's own records; it does not infer it.

    rank 1   outside│overhead│ wait until 0F0 is made │flight│take│ 1F0 ██████ │note│send│wait ... │ drain
                    ▲ the timeline starts with rank 0's first action                 its step ends ▲
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.measured.record import COLUMNS, OVERHEADS, Record, decoded
from drumline.core.timeline.idle import Cause, Idle
from drumline.core.timeline.spans import on_top
from drumline.core.timeline.timeline import Timeline

# Takes (another rank, a moment of its clock) and returns what this rank's clock showed at that moment.
Here = Callable[[int, int], int]


class Doing(StrEnum):
    """What a rank does, with the `part` of the step it adds to and the idle `cause` it stands for."""

    part: str
    cause: Cause | None

    def __new__(cls, text: str, part: str, cause: Cause | None) -> Doing:
        """Create a member from its text and meaning."""
        doing = str.__new__(cls, text)
        doing._value_, doing.part, doing.cause = text, part, cause
        return doing

    COMPUTE = "compute", "busy", None
    SEND = "send", "transfer", Cause.TRANSFER
    TAKE = "take", "transfer", Cause.TRANSFER
    WAIT = "wait", "wait", Cause.WAIT
    FLIGHT = "flight", "transfer", Cause.TRANSFER
    EXCHANGE = "exchange", "transfer", Cause.TRANSFER
    OVERHEAD = "overhead", "overhead", Cause.OVERHEAD
    LEAVE = "leave", "wait", Cause.DRAIN  # the row has ended, but the last messages have not left
    ASK = "ask", "wait", Cause.OUTSIDE  # a stage that serves has nothing to compute
    STREAM_WAIT = "stream wait", "wait", Cause.WAIT  # on a device
    STREAM_FLIGHT = "stream flight", "transfer", Cause.TRANSFER
    NOTHING = "nothing", "unexplained", Cause.UNEXPLAINED


_ORDER = {doing: number for number, doing in enumerate(Doing)}
_LEAVE, _ASK = OVERHEADS.index("leave"), OVERHEADS.index("ask")
_WAITS = {_LEAVE: Doing.LEAVE, _ASK: Doing.ASK}


class Period(NamedTuple):
    """A period in which a rank did one thing, in nanoseconds of its own clock.

    `action` is the number of the timed action that the piece belongs to or precedes; `message` is the receive it is
    about; `other` is the rank at the other end; `kind` is the kind of overhead.
    """

    start: int
    end: int
    doing: Doing
    action: int = -1
    message: Action | None = None
    other: int = -1
    kind: str = ""


def account(record: Record, here: Here) -> list[Period]:
    """Return a rank's step as pieces without gaps, from start to end.

    >>> record = Record(0, begin_ns=0, end_ns=100, starts=[20], ends=[90], overheads=[0, 0, 15])
    >>> [(piece.start, piece.end, str(piece.doing)) for piece in account(record, lambda rank, moment: moment)]
    [(0, 15, 'overhead'), (15, 20, 'nothing'), (20, 90, 'compute'), (90, 100, 'nothing')]
    """
    spans = [(s.start, s.end, _ORDER[s.doing], s[2:]) for s in _spans(record, here) if s.end > s.start]
    pieces = on_top(spans, record.begin_ns, record.end_ns)
    return [Period(start, end, *(said or (Doing.NOTHING,))) for start, end, said in pieces]


def _spans(record: Record, here: Here) -> Iterator[Period]:
    """Yield every span of a record, in any order."""
    for number, (start, end) in enumerate(zip(record.starts, record.ends, strict=True)):
        yield Period(start, end, Doing.COMPUTE, number)
    messages = list(record.rows("messages"))
    for action, *coded, source, ready, _, _, start, end, _ in messages:
        receive = decoded(*coded)
        yield Period(start, end, Doing.TAKE, action, receive, source)
        if record.on_device and action < len(record.starts):
            free = record.ends[action - 1] if action else record.begin_ns
            yield from _until(here(source, ready), free, record.starts[action], action, receive, source)
    for message, start, end in record.rows("waits"):
        action, *coded, source, ready = messages[message][:6]
        yield from _until(here(source, ready), start, end, action, decoded(*coded), source, on_host=True)
    for *coded, target, start, end, _ in record.rows("sends"):
        yield Period(start, end, Doing.SEND, -1, decoded(*coded), target)
    for _, start, end in record.rows("exchanges"):
        yield Period(start, end, Doing.EXCHANGE)
    for kind, start, end in record.rows("overheads"):
        yield Period(start, end, _WAITS.get(kind, Doing.OVERHEAD), kind=OVERHEADS[kind])


def _until(
    ready: int, start: int, end: int, action: int, receive: Action, source: int, *, on_host: bool = False
) -> Iterator[Period]:
    """Split a wait in two: until its message was made, and from then on."""
    ready = min(max(ready, start), end)
    wait, flight = (Doing.WAIT, Doing.FLIGHT) if on_host else (Doing.STREAM_WAIT, Doing.STREAM_FLIGHT)
    yield Period(start, ready, wait, action, receive, source)
    yield Period(ready, end, flight, action, receive, source)


NANO = 1e-9

_WIDTH = len(COLUMNS["messages"])
_SOURCE, _MADE = COLUMNS["messages"].index("source"), COLUMNS["messages"].index("made")


@dataclass(frozen=True, slots=True)
class StepParts:
    """One rank's step in seconds, by what the rank did; every part except the last is a sum of recorded spans.

    `busy` is compute. `transfer` is moving messages, or having them on their way with nothing else to do. `wait` is
    waiting for another rank to make one. `overhead` is the executor's own time. No span covers `unexplained` time.
    """

    busy: float
    transfer: float
    wait: float
    overhead: float
    unexplained: float

    @property
    def total(self) -> float:
        """The seconds from the call of `step` to its end."""
        return self.busy + self.transfer + self.wait + self.overhead + self.unexplained


def parts_of(pieces: Sequence[Period]) -> StepParts:
    """Add up the pieces of a step by part.

    >>> parts_of([Period(0, 10, Doing.OVERHEAD), Period(10, 90, Doing.COMPUTE), Period(90, 100, Doing.SEND)])
    StepParts(busy=8e-08, transfer=1e-08, wait=0.0, overhead=1e-08, unexplained=0.0)
    """
    sums = dict.fromkeys(("busy", "transfer", "wait", "overhead", "unexplained"), 0)
    for piece in pieces:
        sums[piece.doing.part] += piece.end - piece.start
    return StepParts(*(nanoseconds * NANO for nanoseconds in sums.values()))


def summed_parts(record: Record, here: Here) -> StepParts:
    """Return the parts of a record by adding up its columns, which is fast enough for every step.

    This is correct on a host, where spans never overlap, so nothing has to be laid out in time first.

    >>> summed_parts(Record(0, begin_ns=0, end_ns=100, starts=[10], ends=[90]), lambda rank, moment: moment)
    StepParts(busy=8e-08, transfer=0.0, wait=0.0, overhead=0.0, unexplained=2e-08)
    """
    if record.on_device or record.exchanges:
        return parts_of(account(record, here))
    busy = sum(record.ends) - sum(record.starts)
    transfer, overhead = _length(record, "sends") + _length(record, "messages"), _length(record, "overheads")
    wait = 0
    if _LEAVE in (kinds := record.column("overheads", "kind")):  # once, at the end of the row
        at = 3 * kinds.index(_LEAVE)
        wait = record.overheads[at + 2] - record.overheads[at + 1]
    if _ASK in kinds:
        wait += sum(end - start for kind, start, end in record.rows("overheads") if kind == _ASK)
    overhead -= wait
    for message, start, end in record.rows("waits"):
        at = message * _WIDTH
        ready = here(record.messages[at + _SOURCE], record.messages[at + _MADE])
        ready = min(max(ready, start), end)
        wait += ready - start
        transfer += end - ready
    left = record.end_ns - record.begin_ns - busy - transfer - wait - overhead
    return StepParts(*(nanoseconds * NANO for nanoseconds in (busy, transfer, wait, overhead, left)))


def _length(record: Record, table: str) -> int:
    return sum(record.column(table, "to")) - sum(record.column(table, "from"))


def idle_intervals(
    timeline: Timeline, rank: int, pieces: list[Period], seconds: Callable[[int, int], float]
) -> Iterator[Idle]:
    """Yield a rank's idle intervals from the timeline's start to its end, in time order.

    `pieces` are the rank's account; `seconds(rank, moment)` converts a moment of its clock to the timeline's time.
    """
    low, high = timeline.start, timeline.end
    upcoming = _upcoming(pieces)
    begin, end = (seconds(rank, moment) for moment in (pieces[0].start, pieces[-1].end))
    if begin > low:
        yield from _before_begin(timeline, rank, low, min(begin, high))
    actions = timeline.tracks[rank].actions
    for number, piece in enumerate(pieces):
        start, stop = max(seconds(rank, piece.start), low), min(seconds(rank, piece.end), high)
        if stop > start and piece.doing.cause is not None:
            before = actions[upcoming[number]] if upcoming[number] < len(actions) else None
            fills = piece.doing.cause is Cause.WAIT and upcoming[number] == 0
            cause = Cause.FILL if fills else piece.doing.cause
            yield Idle(rank, start, stop, cause, before, *_about(timeline, rank, piece), piece.kind)
    if end < high:
        on_rank, action = timeline.last_action
        yield Idle(rank, max(end, low), high, Cause.DRAIN, None, action, on_rank)


def _upcoming(pieces: list[Period]) -> list[int]:
    """Return, per piece, the number of the next timed action; one past the last if there is none."""
    followings, following = [], 1 + max((piece.action for piece in pieces if piece.doing is Doing.COMPUTE), default=-1)
    for piece in reversed(pieces):
        if piece.doing is Doing.COMPUTE:
            following = piece.action
        followings.append(following)
    return followings[::-1]


def _before_begin(timeline: Timeline, rank: int, start: float, end: float) -> Iterator[Idle]:
    """Yield the time before the rank's step: fill until its first input exists, then lateness."""
    track = timeline.tracks[rank]
    before = track.actions[0] if track.actions else None
    needed = timeline.inputs(rank, before) if before is not None else []
    ready, on_rank, _, waits_for = needed[-1] if needed else (0.0, None, None, None)
    filled = min(max(ready, start), end)
    if filled > start:
        yield Idle(rank, start, filled, Cause.FILL, before, waits_for, on_rank)
    if end > filled:
        yield Idle(rank, filled, end, Cause.OUTSIDE, before)


def _about(timeline: Timeline, rank: int, piece: Period) -> tuple[Action | None, int | None]:
    """Return what the piece waits for or moves, and on which rank that is."""
    if piece.doing is Doing.LEAVE:
        on_rank, action = timeline.last_action
        return action, on_rank
    receive = piece.message
    if receive is None:
        return None, None
    if receive.op is Op.REDUCE_GRAD:
        return receive, piece.other
    if piece.doing is Doing.SEND:
        return rules.message_of(receive).send, rank
    if piece.doing is Doing.TAKE:
        return receive, rank
    producer = next((producer for producer in rules.producers(receive) if producer[:3] in timeline.located), None)
    # Without a flush, another rank may have made it in its step before, of which nothing is drawn here.
    return (None, None) if producer is None else (producer, piece.other)
