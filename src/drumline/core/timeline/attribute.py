"""Why each idle second was idle.

    rank 1  ....F0..........B0      the rank's first action starts late: fill
            |fill|  wait    |       then it waits for 2B0 of rank 2 to end: wait
                            |       and for its gradient to arrive: transfer

    fill        before the rank's first action          drain    after its last one
    wait        for an action of another rank           transfer the input exists and is on its way
    imbalance   the part of these three that equal stages and microbatches would not have
    memory      the part of a wait in which a later forward was ready, but the limit did not allow holding it

In a measured timeline, recorded spans say what a rank did when it did not compute (see `account`). Besides fill, drain,
wait and transfer there are then

    overhead    the executor's own work                 outside  the rank had not begun its step when others had
    unexplained time that no span covers
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from drumline.core.action import Action, Op
from drumline.core.timeline.idle import Cause, Idle, Limit
from drumline.core.timeline.timeline import Timeline


def attribute(timeline: Timeline, limit: Limit | None = None) -> tuple[Idle, ...]:
    r"""Return every idle interval with its cause, rank by rank in time order; they sum to `timeline.idle`.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> for idle in attribute(simulate(Program.parse("0F0,0B0\n1F0,1B0"))):
    ...     print(idle)
    rank 0 idle 3 from 1: 0B0 waits for 1B0 of rank 1
    rank 1 idle 1 from 0: the pipeline fills; 1F0 waits for 0F0 of rank 0
    rank 1 idle 2 from 4: the pipeline drains; 0B0 of rank 0 ends last
    """
    if timeline.says_causes:
        return tuple(timeline.causes)
    return tuple(idle for rank in range(timeline.num_ranks) for idle in _Track(timeline, rank, limit).intervals())


class _Track:
    """One rank's track, walked once from left to right."""

    def __init__(self, timeline: Timeline, rank: int, limit: Limit | None) -> None:
        self.timeline = timeline
        self.rank = rank
        self.track = timeline.tracks[rank]
        self.twin = timeline.balanced
        self.occupied = deque(timeline.occupied[rank])
        self.limit = limit
        self.next_forward = _next_forwards(self.track.actions) if limit else []

    def intervals(self) -> Iterator[Idle]:
        for low, high, index, waiting in self.timeline.gaps(self.rank):
            yield from self.drain(low) if waiting is Cause.DRAIN else self.gap(low, high, index, waiting)

    def gap(self, start: float, end: float, index: int, waiting: Cause) -> Iterator[Idle]:
        action = self.track.actions[index]
        ready, on_rank, waits_for = self.latest_input(index) or (start, None, None)
        excess = end - start - self.twin_gap(index) if self.twin else 0.0
        for free_from, free_to, moved in self.split_by_occupied(start, end):
            if moved is not None:
                yield Idle(self.rank, free_from, free_to, Cause.TRANSFER, action, moved, self.rank)
                continue
            waited_to = min(max(ready, free_from), free_to)
            balanced_to = waited_to - min(max(excess, 0.0), waited_to - free_from)
            excess -= waited_to - balanced_to
            refused_from = self.refused_from(index, free_from, balanced_to)
            bounds = (free_from, refused_from, balanced_to, waited_to, free_to)
            causes = (waiting, Cause.MEMORY, Cause.IMBALANCE, Cause.TRANSFER)
            yield from self.parts(bounds, causes, action, waits_for, on_rank)

    def parts(self, bounds: Sequence[float], causes: Sequence[Cause], *about: Any) -> Iterator[Idle]:
        """Yield the intervals between the bounds, each with its cause; `about` is the same for all."""
        for (low, high), cause in zip(pairwise(bounds), causes, strict=True):
            if high > low:
                yield Idle(self.rank, low, high, cause, *about)

    def latest_input(self, index: int) -> tuple[float, int, Action] | None:
        """Return when, where and by which action the last input of the action at `index` was made, if any."""
        awaited = self.timeline.awaited_before(self.rank, index)
        if awaited is not None:
            return awaited.start, self.rank, awaited.action
        return self.timeline.latest_input(self.rank, index)

    def drain(self, free: float) -> Iterator[Idle]:
        timeline = self.timeline
        # A rank that has finished computing counts as transferring while its own gradients are being exchanged.
        own_spans = (span for span in timeline.exchanges if span.rank == self.rank and span.end > span.start)
        exchanged = max((span.end for span in own_spans), default=free)
        on_rank, waits_for = timeline.last_action
        excess = timeline.end - free - self.twin_gap(len(self.track.ends)) if self.twin else 0.0
        for free_from, free_to, moved in self.split_by_occupied(free, timeline.end):
            if moved is not None:
                yield Idle(self.rank, free_from, free_to, Cause.TRANSFER, None, moved, self.rank)
                continue
            exchanged_to = min(max(exchanged, free_from), free_to)
            drained_to = free_to - min(max(excess, 0.0), free_to - exchanged_to)
            excess -= free_to - drained_to
            bounds = (free_from, exchanged_to, drained_to, free_to)
            causes = (Cause.TRANSFER, Cause.DRAIN, Cause.IMBALANCE)
            yield from self.parts(bounds, causes, None, waits_for, on_rank)

    def twin_gap(self, index: int) -> float:
        """Return how long the balanced twin idles before the action at `index` (one past the last: at the end)."""
        assert self.twin is not None
        track = self.twin.tracks[self.rank]
        free = track.ends[index - 1] if index else self.twin.start
        return (track.starts[index] if index < len(track.starts) else self.twin.end) - free

    def split_by_occupied(self, start: float, end: float) -> Iterator[tuple[float, float, Action | None]]:
        """Yield the parts of the interval, each with the message that the rank itself was busy moving, if any."""
        while self.occupied and self.occupied[0].start < end:
            span = self.occupied.popleft()
            if span.start > start:
                yield start, span.start, None
            if span.end > span.start:
                yield span.start, span.end, span.action
            start = max(start, span.end)
        if end > start:
            yield start, end, None

    def refused_from(self, index: int, start: float, end: float) -> float:
        """Return from when on a later forward was ready and only the limit blocked it; `end` if that never happened."""
        if not self.limit or index == 0 or (upcoming := self.next_forward[index]) < 0:
            return end
        forward = next(part for part in self.track.actions[upcoming].work if part.op is Op.FORWARD)
        if not self.would_exceed(index - 1, forward):
            return end
        ready = max((value for value, *_ in self.timeline.inputs(self.rank, forward)), default=start)
        return min(max(ready, start), end)

    def would_exceed(self, index: int, forward: Action) -> bool:
        assert self.limit is not None
        holding = self.timeline.memory[self.rank]
        if not self.limit.admits_pairs(holding.pairs[index][1] + 1):
            return True
        if self.limit.max_bytes is None or holding.bytes is None:
            return False
        where = self.timeline.located[forward.stage, forward.op, forward.microbatch][1]
        size = holding.bytes[where][0] - (holding.bytes[where - 1][1] if where else holding.static_bytes)
        return not self.limit.admits_bytes(holding.bytes[index][1] + size)


def _next_forwards(actions: Sequence[Action]) -> list[int]:
    """Return, per action, the index of the next action that contains a forward, or -1."""
    upcomings, upcoming = [], -1
    for index in range(len(actions) - 1, -1, -1):
        upcomings.append(upcoming)
        if any(part.op is Op.FORWARD for part in actions[index].work):
            upcoming = index
    return upcomings[::-1]
