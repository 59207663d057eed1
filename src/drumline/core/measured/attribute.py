"""Why each idle second of a measured step was idle: not derived, but read off what the rank noted.

rank 1   outside│overhead│ wait until 0F0 is made │flight│take│ 1F0 ██████ │note│send│wait ... │ drain
▲ the timeline starts with rank 0's first action                        its step ends ▲
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.measured.account import Doing, Piece
from drumline.core.timeline.idle import Cause, Idle
from drumline.core.timeline.timeline import Timeline

_CAUSES = {
    Doing.SEND: Cause.TRANSFER,
    Doing.TAKE: Cause.TRANSFER,
    Doing.WAIT: Cause.WAIT,
    Doing.FLIGHT: Cause.TRANSFER,
    Doing.EXCHANGE: Cause.TRANSFER,
    Doing.OVERHEAD: Cause.OVERHEAD,
    Doing.LEAVE: Cause.DRAIN,
    Doing.STREAM_WAIT: Cause.WAIT,
    Doing.STREAM_FLIGHT: Cause.TRANSFER,
    Doing.NOTHING: Cause.UNEXPLAINED,
}


def idle_intervals(
    timeline: Timeline, rank: int, pieces: list[Piece], seconds: Callable[[int, int], float]
) -> Iterator[Idle]:
    """Yield a rank's idle intervals from the timeline's start to its end, in order of time.

    `pieces` are the rank's account, and `seconds(rank, moment)` tells a moment of its clock in the timeline's time.
    """
    low, high = timeline.start, timeline.end
    upcoming = _upcoming(pieces)
    begin, end = (seconds(rank, moment) for moment in (pieces[0].start, pieces[-1].end))
    if begin > low:
        yield from _before_begin(timeline, rank, low, min(begin, high))
    explained = _Explained(timeline, rank)
    for number, piece in enumerate(pieces):
        start, stop = max(seconds(rank, piece.start), low), min(seconds(rank, piece.end), high)
        if stop > start and piece.doing is not Doing.COMPUTE:
            yield explained.idle(piece, upcoming[number], start, stop)
    if end < high:
        on_rank, action = timeline.last_action
        yield Idle(rank, max(end, low), high, Cause.DRAIN, None, action, on_rank)


def _upcoming(pieces: list[Piece]) -> list[int]:
    """Return, per piece, the number of the next timed action; one past the last where none comes."""
    found, following = [], 1 + max((piece.action for piece in pieces if piece.doing is Doing.COMPUTE), default=-1)
    for piece in reversed(pieces):
        if piece.doing is Doing.COMPUTE:
            following = piece.action
        found.append(following)
    return found[::-1]


def _before_begin(timeline: Timeline, rank: int, start: float, end: float) -> Iterator[Idle]:
    """Yield the time before the rank's step: the pipeline fills until its first input is made, then it is late."""
    track = timeline.tracks[rank]
    before = track.actions[0] if track.actions else None
    needed = timeline.inputs(rank, before) if before is not None else []
    made, on_rank, _, waits_for = needed[-1] if needed else (0.0, None, None, None)
    filled = min(max(made, start), end)
    if filled > start:
        yield Idle(rank, start, filled, Cause.FILL, before, waits_for, on_rank)
    if end > filled:
        yield Idle(rank, filled, end, Cause.OUTSIDE, before)


class _Explained:
    """Turns the pieces of a rank into idle intervals."""

    def __init__(self, timeline: Timeline, rank: int) -> None:
        self.timeline = timeline
        self.rank = rank
        self.actions = timeline.tracks[rank].actions

    def idle(self, piece: Piece, upcoming: int, start: float, end: float) -> Idle:
        before = self.actions[upcoming] if upcoming < len(self.actions) else None
        cause = _CAUSES[piece.doing]
        if cause is Cause.WAIT and upcoming == 0:
            cause = Cause.FILL
        waits_for, on_rank = self.about(piece)
        return Idle(self.rank, start, end, cause, before, waits_for, on_rank, piece.kind)

    def about(self, piece: Piece) -> tuple[Action | None, int | None]:
        """Return what the piece waits for, or moves, and on which rank that is."""
        if piece.doing is Doing.LEAVE:
            on_rank, action = self.timeline.last_action
            return action, on_rank
        receive = piece.message
        if receive is None:
            return None, None
        if receive.op is Op.REDUCE_GRAD:
            return receive, piece.other
        if piece.doing is Doing.SEND:
            return rules.message_of(receive).send, self.rank
        if piece.doing is Doing.TAKE:
            return receive, self.rank
        made = next(one for one in rules.producers(receive) if one[:3] in self.timeline.located)
        return made, piece.other
