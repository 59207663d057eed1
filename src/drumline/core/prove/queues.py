"""Checks whether rows with sends and receives run to the end with one message queue per pair of ranks, or per rank.

Compute continues while messages are pending; messages only wait for each other:

    rank 0   0RECV_B0,0F0,0SEND_F0,0B0     its queue:  0RECV_B0  0SEND_F0
    rank 1   1RECV_F0,1F0,1B0,1SEND_B0     its queue:  1RECV_F0

A message moves when it is first in its queue on both ranks. Here 0SEND_F0 waits behind 0RECV_B0, whose message rank 1
sends only after it has received 0SEND_F0. Nothing can move, and following who waits for whom leads round a cycle.
Nothing that is possible ever becomes impossible again, so one way of running the rows represents all of them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from drumline.core import rules
from drumline.core.action import SEND_OPS, Action
from drumline.core.channel import Queues
from drumline.core.prove.index import Index, RowPosition
from drumline.core.prove.violation import Violation


class Travel(NamedTuple):
    """A message: where its send and its receive are posted."""

    sent: RowPosition
    received: RowPosition


Waiter = int | Travel  # a blocked rank, or a blocked message


def check(
    index: Index, needed: Mapping[RowPosition, Sequence[RowPosition]], channel: Queues | None
) -> Iterator[Violation]:
    """Yield each cycle of ranks and messages that wait for each other.

    `needed` lists, per position, the positions of other ranks that it waits for. If such a position is a send or a
    receive, the wait ends when the message has moved; otherwise when the other rank has passed it. With no channel, or
    one queue per edge, messages never wait for each other, and passing the send is enough; otherwise messages must be
    well-formed.
    """
    replay = _Replay(index, needed, channel)
    replay.run()
    yield from replay.cycles()


class _Replay:
    """All rows, run as far as the channel allows."""

    def __init__(
        self, index: Index, needed: Mapping[RowPosition, Sequence[RowPosition]], channel: Queues | None
    ) -> None:
        self.rows = index.program.rows
        self.needed = needed
        self.channel = channel or Queues.EDGE
        self.travels: dict[RowPosition, Travel] = {}
        for action, places in index.transfers.items() if channel else ():
            if action.op in SEND_OPS:
                travel = Travel(places[0], index.transfers[rules.message_of(action).recv][0])
                self.travels[travel.sent] = self.travels[travel.received] = travel
        self.at = [0] * len(self.rows)
        self.queues: dict[tuple[int, ...], deque[Travel]] = defaultdict(deque)
        self.moved: set[Travel] = set()
        self.waiting: dict[RowPosition, list[int]] = defaultdict(list)

    def run(self) -> None:
        """Run every rank until it finishes or waits for something that never happens."""
        active = list(range(len(self.rows)))
        while active:
            rank = active.pop()
            while self.at[rank] < len(self.rows[rank]):
                if (blocker := self.blocker(rank)) is not None:
                    self.waiting[blocker].append(rank)
                    break
                place = RowPosition(rank, self.at[rank])
                self.at[rank] += 1
                if (travel := self.travels.get(place)) is not None:
                    self.queues[self.key(travel, place)].append(travel)
                    active += self.deliver(travel)
                else:
                    active += self.waiting.pop(place, ())

    def blocker(self, rank: int) -> RowPosition | None:
        """Return the first thing that a rank's next action waits for and that has not happened."""
        inputs = self.needed.get(RowPosition(rank, self.at[rank]), ())
        return next((place for place in inputs if not self.happened(place)), None)

    def happened(self, place: RowPosition) -> bool:
        travel = self.travels.get(place)
        return self.at[place.rank] > place.at if travel is None else travel in self.moved

    def key(self, travel: Travel, end: RowPosition) -> tuple[int, ...]:
        """Return the queue that a message uses at one of its ends."""
        sends = end == travel.sent
        return self.channel.key(end.rank, (travel.received if sends else travel.sent).rank, sends=sends)

    def deliver(self, travel: Travel) -> list[int]:
        """Move a message if possible, and those behind it; return the ranks that waited for them."""
        woken: list[int] = []
        tried = [travel]
        while tried:
            message = tried.pop()
            queues = [self.queues[self.key(message, end)] for end in message]
            if all(queue and queue[0] == message for queue in queues):
                self.moved.add(message)
                for queue, end in zip(queues, message, strict=True):
                    queue.popleft()
                    tried += [queue[0]] if queue else []
                    woken += self.waiting.pop(end, ())
        return woken

    def cycles(self) -> Iterator[Violation]:
        """Follow who waits for whom from every blocked rank; report each cycle once."""
        seen_travels: set[Waiter] = set()
        for start in (rank for rank, row in enumerate(self.rows) if self.at[rank] < len(row)):
            path: list[Waiter] = []
            waiter: Waiter = start
            while waiter not in seen_travels:
                seen_travels.add(waiter)
                path.append(waiter)
                waiter = self.waits_for(waiter)
            if waiter in path:
                yield self.violation(path[path.index(waiter) :])

    def waits_for(self, waiter: Waiter) -> Waiter:
        """Return what a blocked rank or a blocked message waits for."""
        if isinstance(waiter, int):
            place = self.blocker(waiter)
            assert place is not None, "a blocked rank waits for something"
            return self.travels.get(place, place.rank)
        unposted = self.unposted(waiter)
        return unposted.rank if unposted is not None else self.before(waiter)[1]

    def unposted(self, travel: Travel) -> RowPosition | None:
        return next((end for end in travel if self.at[end.rank] <= end.at), None)

    def before(self, travel: Travel) -> tuple[RowPosition, Travel]:
        """Return the end at which a posted message is not first in its queue, and the message that is."""
        heads = ((end, self.queues[self.key(travel, end)][0]) for end in travel)
        return next((end, head) for end, head in heads if head != travel)

    def violation(self, cycle: Sequence[Waiter]) -> Violation:
        """Return a cycle as a violation at its first rank, or at a message if no rank takes part."""
        at = next((number for number, index in enumerate(cycle) if isinstance(index, int)), 0)
        turned = [*cycle[at:], *cycle[:at]]
        first = turned[0]
        place = RowPosition(first, self.at[first]) if isinstance(first, int) else first.received
        why = f"never {'runs' if isinstance(first, int) else 'arrives'}"
        if any(isinstance(travel, Travel) and self.unposted(travel) is None for travel in cycle):
            why += f" on a channel with one queue per {self.channel.words}"
        else:
            why += ", ranks wait for each other"
        return Violation(*place, self.action(place), f"{why}: {'; '.join(self.links(turned))}")

    def links(self, cycle: Sequence[Waiter]) -> Iterator[str]:
        for before, waiter in pairwise([cycle[-1], *cycle]):
            if isinstance(waiter, int):
                place, needed = RowPosition(waiter, self.at[waiter]), self.needed_by(waiter)
                yield f"rank {waiter} at {self.action(place)} (position {place.at}) waits for {needed}"
            elif (missing := self.unposted(waiter)) is None:
                end, head = self.before(waiter)
                ahead = head.sent if head.sent.rank == end.rank else head.received
                yield f"{self.action(end)} of rank {end.rank} waits behind its {self.action(ahead)}"
            elif not isinstance(before, int):  # otherwise the rank's own link already says it
                other = waiter.received if missing == waiter.sent else waiter.sent
                yield f"{self.action(other)} of rank {other.rank} waits for {self.shown(missing)}"

    def needed_by(self, rank: int) -> str:
        """Return what a rank waits for: a position that another has not reached, or a message that does not move."""
        needed = self.blocker(rank)
        assert needed is not None
        travel = self.travels.get(needed)
        missing = needed if travel is None else self.unposted(travel)
        if missing is not None:
            return self.shown(missing)
        assert travel is not None
        return f"{self.action(travel.sent)} of rank {travel.sent.rank}"

    def shown(self, place: RowPosition) -> str:
        return f"{self.action(place)} of rank {place.rank} (position {place.at})"

    def action(self, place: RowPosition) -> Action:
        return self.rows[place.rank][place.at]
