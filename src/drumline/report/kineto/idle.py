"""Why each idle second of a recorded step was idle: what its trace proves, and nothing more.

    before 1F3   ├──── wait ─────┤ overhead ├─ transfer ─┤ overhead │ unexplained ┤ 1F3
                 0F3 is computed │ not sent │ on its way │ named    │ not named   │

fill, wait    until the input that the action waited for was made, by an action of another rank
transfer      from when both ends of the message could move it to when it had arrived; or a send or a gradient exchange
              was waited for, as a label of a WAIT says (torch 2.15) or the time at which a send was done
overhead      something else that has a name: the message was made and not sent, or a label, a call, an annotation
              kept the rank's host, or kernels of no action its device
unexplained   what is left; after the rank's last action it is drain instead
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from drumline.core import rules
from drumline.core.action import AWAITED, SEND_OPS, WAIT_OPS, Action
from drumline.core.timeline.idle import Cause, Idle

if TYPE_CHECKING:
    from drumline.report.kineto.traces import Traced


@dataclass(frozen=True, slots=True)
class Kept(Idle):
    """An idle interval in which something with a name kept the rank."""

    what: str = ""

    @property
    def why(self) -> str:
        """The cause in words."""
        behind = f"; {self.before} comes behind it" if self.before is not None else ""
        return f"the rank is busy with {self.what}{behind}"


@dataclass(frozen=True, slots=True)
class Unsent(Idle):
    """An idle interval in which the input was made, and its rank had not sent it yet."""

    @property
    def why(self) -> str:
        """The cause in words."""
        return f"{self.waits_for} of rank {self.on_rank} is made, but not yet sent to {self.before}"


def causes(timeline: Traced) -> Iterator[Idle]:
    """Yield every idle interval with its cause, rank by rank in order of time; they sum to `timeline.idle`."""
    for rank in range(timeline.num_ranks):
        yield from _Rank(timeline, rank).intervals()


class _Rank:
    """One rank's track, walked once from left to right."""

    def __init__(self, timeline: Traced, rank: int) -> None:
        self.timeline = timeline
        self.rank = rank
        self.track = timeline.tracks[rank]
        self.step = timeline.ranks[rank]
        self.awaited = {str(one): one._replace(op=AWAITED[one.op]) for one in self.step.order if one.op in WAIT_OPS}
        self.others = [(timeline.seconds(s), timeline.seconds(e), name) for name, s, e in self.step.others]
        # Of what lasts longest it is not known from its start alone whether it reaches into a gap.
        self.longest = max((end - start for start, end, _ in self.others), default=0.0)
        self.sends = sorted(
            (timeline.seconds(half.done), timeline.seconds(half.posted), action)
            for action, half in self.step.halves.items()
            if action.op in SEND_OPS and half.done is not None
        )

    def intervals(self) -> Iterator[Idle]:
        free = self.timeline.start
        waiting = Cause.FILL
        for index, start in enumerate(self.track.starts):
            if start > free:
                yield from self.gap(free, start, index, waiting)
            free = self.track.ends[index]
            waiting = Cause.WAIT
        if self.timeline.end > free:
            yield from self.named(free, self.timeline.end, None)

    def gap(self, low: float, high: float, index: int, waiting: Cause) -> Iterator[Idle]:
        action = self.track.actions[index]
        place = self.timeline.latest_inputs[self.rank].place(index)
        if place is None:
            yield from self.named(low, high, action)
            return
        needed = self.needed(action, place[0], place[1])
        made = _within(self.timeline.tracks[place[0]].ends[place[1]], low, high)
        sent, moving, arrived = self.moved(index, needed, made, high)
        if made > low:
            yield Idle(self.rank, low, made, waiting, action, needed, place[0])
        if sent > made:
            yield Unsent(self.rank, made, sent, Cause.OVERHEAD, action, needed, place[0])
        if moving > sent:
            yield from self.named(sent, moving, action)
        if arrived > moving:
            yield Idle(self.rank, moving, arrived, Cause.TRANSFER, action, needed, place[0])
        if high > arrived:
            yield from self.named(arrived, high, action)

    def needed(self, action: Action, rank: int, index: int) -> Action:
        """Return the plain action, perhaps half of a pair, that made the input of `action`."""
        made = self.timeline.tracks[rank].actions[index]
        stages = self.timeline.program.num_stages
        wanted = {one for part in action.work for some in rules.needs(part, stages) for one in some}
        return next((part for part in made.work if part in wanted), made)

    def moved(self, index: int, needed: Action, made: float, high: float) -> tuple[float, float, float]:
        """Return when the message behind `needed` was sent, when both ends could move it, and when it had arrived."""
        message = rules.message(needed, self.timeline.program.num_stages)
        known = None if message is None else self.timeline.messages.get(message.send)
        if known is None or known[3].done is None:
            return made, made, made
        seconds = self.timeline.seconds
        arrived = _within(seconds(known[3].done), made, high)
        sent = _within(seconds(known[2].begun), made, arrived)
        taking = max(known[3].begun, self.step.ran[index].waiting)
        return sent, _within(seconds(taking), sent, arrived), arrived

    def named(self, low: float, high: float, before: Action | None) -> Iterator[Idle]:
        """Yield a stretch by what has a name in it; the innermost counts. What has none is drain at the end."""
        first = bisect_left(self.others, (low - self.longest,))
        inside = []
        for start, end, name in self.others[first:]:
            if start >= high:
                break
            if end > low:
                inside.append((max(start, low), min(end, high), name))
        for start, end, name in _innermost(inside, low, high):
            if name in self.awaited:
                yield Idle(self.rank, start, end, Cause.TRANSFER, before, self.awaited[name], self.rank)
            elif name:
                yield Kept(self.rank, start, end, Cause.OVERHEAD, before, what=name)
            elif before is None:
                on_rank, last = self.last()
                yield Idle(self.rank, start, end, Cause.DRAIN, None, last, on_rank)
            else:
                yield from self.unnamed(start, end, before)

    def unnamed(self, low: float, high: float, before: Action) -> Iterator[Idle]:
        """Yield a stretch without a name: transfer as long as the host waited for a send, unexplained behind it."""
        for done, posted, action in self.sends[bisect_left(self.sends, (low,)) :]:
            if done > high:
                break
            waited = max(low, posted)
            if done > waited:
                if waited > low:
                    yield Idle(self.rank, low, waited, Cause.UNEXPLAINED, before)
                yield Idle(self.rank, waited, done, Cause.TRANSFER, before, action, self.rank)
                low = done
        if high > low:
            yield Idle(self.rank, low, high, Cause.UNEXPLAINED, before)

    def last(self) -> tuple[int, Action]:
        """Return the rank and the action that ends last of all."""
        tracks = self.timeline.tracks
        rank = max(range(len(tracks)), key=lambda one: tracks[one].ends[-1])
        return rank, tracks[rank].actions[-1]


def _innermost(
    marks: Sequence[tuple[float, float, str]], low: float, high: float
) -> Iterator[tuple[float, float, str]]:
    """Yield the stretch in pieces, each with the name that began last of those that cover it, or with none.

    >>> list(_innermost([(1, 9, "outer"), (2, 4, "inner")], 0, 10))
    [(0, 1, ''), (1, 2, 'outer'), (2, 4, 'inner'), (4, 9, 'outer'), (9, 10, '')]
    """
    edges = sorted({low, high, *(edge for start, end, _ in marks for edge in (start, end))})
    # The last to begin lies on top; what has ended is taken off once it gets there.
    covering: list[tuple[float, float, str]] = []
    upcoming, begun, name = 0, low, ""
    for at in edges[:-1]:
        while upcoming < len(marks) and marks[upcoming][0] <= at:
            start, end, one = marks[upcoming]
            heappush(covering, (-start, end, one))
            upcoming += 1
        while covering and covering[0][1] <= at:
            heappop(covering)
        now = covering[0][2] if covering else ""
        if now != name:
            if at > begun:
                yield begun, at, name
            begun, name = at, now
    if high > begun:
        yield begun, high, name


def _within(moment: float, low: float, high: float) -> float:
    return min(max(moment, low), high)
