"""Requests that wait, bounded in number and in bytes; oldest first, together only with those of the same shape."""

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
        self._numbers = count()
        self._requests = 0

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
            why = f"requests of {self.bytes} bytes wait already, {self.max_bytes} are allowed; try again later"
            raise Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        self._waiting.setdefault(ticket.signature, deque()).append(ticket)
        self._requests += 1
        self.bytes += ticket.bytes

    def drop(self, ticket: Ticket) -> None:
        """Forget a request that nobody waits for any more, if it still waits."""
        tickets = self._waiting.get(ticket.signature)
        if tickets and ticket in tickets:
            tickets.remove(ticket)
            self._gone(ticket)

    def oldest(self) -> Ticket | None:
        """Return the request that has waited longest, after forgetting those that are over."""
        for tickets in list(self._waiting.values()):
            while tickets and tickets[0].is_over:
                self._gone(tickets.popleft())
        for signature in [pair for pair, tickets in self._waiting.items() if not tickets]:
            del self._waiting[signature]
        return min((tickets[0] for tickets in self._waiting.values()), key=lambda ticket: ticket.number, default=None)

    def rows_of(self, signature: Signature, most: int) -> int:
        """Return how many rows of a shape wait, at most `most`; some may be over."""
        total = 0
        for ticket in self._waiting.get(signature, ()):
            total += ticket.rows - ticket.sent
            if total >= most:
                return most
        return total

    def take(self, signature: Signature, rows: int) -> Microbatch | None:
        """Return a microbatch of the oldest rows of a shape, at most so many; None if none are left."""
        slices: list[TicketRows] = []
        tickets = self._waiting.get(signature, deque())
        while tickets and rows > 0:
            ticket = tickets[0]
            if not ticket.is_over:
                slices.append(ticket.take(rows))
                rows -= slices[-1].end - slices[-1].first
            if ticket.is_over or ticket.sent == ticket.rows:
                self._gone(tickets.popleft())
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
        self._requests = self.bytes = 0

    def _gone(self, ticket: Ticket) -> None:
        self._requests -= 1
        self.bytes -= ticket.bytes
