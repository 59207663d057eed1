"""Requests that wait, bounded in number and in bytes; each in its turn, together only with those of the same shape.

    a: 9 rows   b: 1 row   c: 1 row        microbatches of 3 rows
    [a0 a1 a2]  [b0 c0 a3]  [a4 a5 a6]  [a7 a8]

A request with rows left after its microbatch takes its next turn behind all others. So whoever comes waits for one
microbatch of each request before it, however many rows those have.

Bytes are those of requests and of their answers to come, from the arrival until the client has the answer.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import count

import grpc

from drumline.serve.front.tickets import Microbatch, Signature, Ticket, TicketRows
from drumline.serve.wire.frames import Failed


class Queue:
    """What waits for its turn."""

    def __init__(self, *, max_requests: int, max_bytes: int) -> None:
        self.max_requests, self.max_bytes = max_requests, max_bytes
        self.bytes = 0
        self._waiting: OrderedDict[Signature, deque[Ticket]] = OrderedDict()
        self._numbers, self._turns = count(), count()
        self._requests = 0
        self._sizes: dict[Ticket, int] = {}  # bytes

    def __len__(self) -> int:
        return self._requests

    @property
    def rows(self) -> int:
        """How many rows wait, of any shape."""
        return sum(ticket.rows - ticket.sent for tickets in self._waiting.values() for ticket in tickets)

    def admit(self, ticket: Ticket) -> None:
        """Let a request wait, or raise Failed if there are too many."""
        if self._requests >= self.max_requests:
            why = f"{self._requests} requests wait already; try again later"
            raise Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        if self.bytes + ticket.bytes > self.max_bytes:
            why = f"requests and answers have {self.bytes} bytes already, {self.max_bytes} are allowed; try again later"
            if ticket.bytes > self.max_bytes:
                why = f"it has {ticket.bytes} bytes with its answer, {self.max_bytes} are allowed; send fewer rows"
            raise Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        ticket.turn = next(self._turns)
        self._waiting.setdefault(ticket.signature, deque()).append(ticket)
        self._requests += 1
        self._sizes[ticket] = ticket.bytes
        self.bytes += ticket.bytes

    def release(self, ticket: Ticket) -> None:
        """Count the bytes of a request no more: its client has the answer, or has gone."""
        self.bytes -= self._sizes.pop(ticket, 0)

    def drop(self, ticket: Ticket) -> None:
        """Forget a request that nobody waits for any more, if it still waits."""
        tickets = self._waiting.get(ticket.signature)
        if tickets and ticket in tickets:
            tickets.remove(ticket)
            self._requests -= 1

    def oldest(self) -> Ticket | None:
        """Return the request whose turn it is, after forgetting those that are over."""
        for tickets in list(self._waiting.values()):
            while tickets and tickets[0].is_over:
                self._leave(tickets)
        for signature in [pair for pair, tickets in self._waiting.items() if not tickets]:
            del self._waiting[signature]
        return min((tickets[0] for tickets in self._waiting.values()), key=lambda ticket: ticket.turn, default=None)

    def rows_of(self, signature: Signature, most: int) -> int:
        """Return how many rows of a shape wait, at most `most`; some may be over."""
        total = 0
        for ticket in self._waiting.get(signature, ()):
            total += ticket.rows - ticket.sent
            if total >= most:
                return most
        return total

    def take(self, signature: Signature, rows: int) -> Microbatch | None:
        """Return a microbatch of the next rows of a shape, at most so many; None if none are left."""
        slices: list[TicketRows] = []
        tickets = self._waiting.get(signature, deque())
        while tickets and rows > 0:
            ticket = tickets[0]
            if not ticket.is_over:
                slices.append(ticket.take(rows))
                rows -= slices[-1].end - slices[-1].first
            if ticket.is_over or ticket.sent == ticket.rows:
                self._leave(tickets)
            else:
                ticket.turn = next(self._turns)
                tickets.rotate(-1)
        return Microbatch(next(self._numbers), slices) if slices else None

    def alone(self, rows: TicketRows) -> Microbatch:
        """Return rows that were sent together with others as their own microbatch."""
        return Microbatch(next(self._numbers), [rows])

    def clear(self, make: Callable[[], Failed]) -> None:
        """Answer all that wait with an error."""
        for tickets in self._waiting.values():
            for ticket in tickets:
                ticket.fail(make())
        self._waiting.clear()
        self._requests = 0

    def _leave(self, tickets: deque[Ticket]) -> None:
        tickets.popleft()
        self._requests -= 1
