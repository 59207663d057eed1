"""Requests on their way: a ticket for each, and microbatches that carry rows of several.

    tickets       a: 3 rows   b: 1 row   c: 2 rows
    microbatches  [a0 a1] [a2 b0] [c0 c1]

A ticket is answered once all its rows have come back, in their own order, whatever microbatches they were in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np

from drumline.serve.wire.frames import Failed
from drumline.serve.wire.stage_times import StageTimes
from drumline.serve.wire.tensors import Array, Arrays

Signature = tuple[tuple[str, tuple[int, ...]], ...]  # names and shapes of inputs, without rows


def signature_of(inputs: Arrays) -> Signature:
    """Return what requests must have in common to share a microbatch.

    >>> signature_of({"x": np.zeros((3, 4))})
    (('x', (4,)),)
    """
    return tuple((name, array.shape[1:]) for name, array in inputs.items())


class Ticket:
    """A request: its rows, how many of them were sent and came back, and the answer to come."""

    def __init__(
        self, name: str, inputs: Arrays, *, timeout: float, loop: asyncio.AbstractEventLoop, answer_bytes: int = 0
    ) -> None:
        self.name, self.inputs = name, inputs
        self.rows = len(next(iter(inputs.values())))
        self.bytes = sum(array.nbytes for array in inputs.values()) + answer_bytes
        self.turn = 0  # the queue counts them
        self.signature = signature_of(inputs)
        self.arrived = time.monotonic()
        self.deadline = self.arrived + timeout
        self.sent = 0  # rows that microbatches took
        self.left = self.rows  # rows that have not come back
        self.answer: asyncio.Future[Arrays] = loop.create_future()
        self.began = 0.0  # when its first rows were sent
        self.compute = 0.0  # seconds of stages, of the microbatch that took longest
        self.pipe = 0.0  # seconds from entering the first stage until leaving the last, of the slowest microbatch
        self._outputs: Arrays = {}

    @property
    def is_over(self) -> bool:
        """Whether no request waits for it any more."""
        return self.answer.done() or time.monotonic() >= self.deadline

    def take(self, rows: int) -> TicketRows:
        """Return the next rows, at most so many."""
        first = self.sent
        self.sent = min(self.rows, first + rows)
        self.began = self.began or time.monotonic()
        return TicketRows(self, first, self.sent)

    def put(self, first: int, outputs: Arrays) -> None:
        """Take in the outputs of some rows; the last ones answer the request."""
        if self.answer.done():
            return
        rows = len(next(iter(outputs.values())))
        if rows == self.rows:
            self._outputs = outputs
        else:
            if not self._outputs:
                self._outputs = {
                    name: np.empty((self.rows, *output.shape[1:]), output.dtype) for name, output in outputs.items()
                }
            for name, output in outputs.items():
                self._outputs[name][first : first + rows] = output
        self.left -= rows
        if not self.left:
            self.answer.set_result(self._outputs)

    def expire(self) -> None:
        """Answer that the deadline has passed."""
        why = f"no answer within {self.deadline - self.arrived:.3g} seconds"
        self.fail(Failed(grpc.StatusCode.DEADLINE_EXCEEDED, why))

    def fail(self, error: Failed) -> None:
        """Answer with an error, unless it was answered."""
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # whoever has gone need not fetch it


@dataclass(frozen=True, slots=True)
class TicketRows:
    """Rows of a ticket, from `first` to before `end`."""

    ticket: Ticket
    first: int
    end: int


@dataclass(slots=True)
class Microbatch:
    """Rows of tickets that travel together."""

    number: int
    slices: list[TicketRows]
    attempts: int = 0
    body: bytes = field(default=b"", repr=False)  # its request to the first stage
    asked: float = 0.0  # when that was sent
    call: Any = field(default=None, repr=False)

    @property
    def rows(self) -> int:
        """How many rows it has."""
        return sum(part.end - part.first for part in self.slices)

    @property
    def signature(self) -> Signature:
        """What its tickets have in common."""
        return self.slices[0].ticket.signature

    @property
    def deadline(self) -> float:
        """The last moment at which anybody waits for it."""
        return max(part.ticket.deadline for part in self.slices)

    @property
    def is_over(self) -> bool:
        """Whether nobody waits for any of it."""
        return all(part.ticket.is_over for part in self.slices)

    def drop_answered(self) -> bool:
        """Leave out rows of tickets that are answered; whether there were any."""
        left = [part for part in self.slices if not part.ticket.answer.done()]
        dropped, self.slices = len(left) < len(self.slices), left
        return dropped

    def inputs(self) -> Arrays:
        """Return its rows as one array for each input."""
        inputs: Arrays = {}
        for name in self.slices[0].ticket.inputs:
            parts: list[Array] = [part.ticket.inputs[name][part.first : part.end] for part in self.slices]
            inputs[name] = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return inputs

    def took(self, times: Sequence[StageTimes], seconds: float) -> None:
        """Tell its tickets what it took: by what stages measured, or of the whole call."""
        computed = sum(stage_times.end - stage_times.start for stage_times in times) * 1e-9
        inside = (times[-1].end - times[0].arrived) * 1e-9 if times else seconds
        for part in self.slices:
            part.ticket.compute, part.ticket.pipe = max(part.ticket.compute, computed), max(part.ticket.pipe, inside)

    def put(self, outputs: Arrays) -> None:
        """Give every ticket its own rows of the outputs; Failed if there are not as many as were sent."""
        odd = [name for name, output in outputs.items() if not output.shape or len(output) != self.rows]
        if odd or not outputs:
            raise Failed(grpc.StatusCode.INTERNAL, f"output {odd[0] if odd else '?'!r} has not the rows that were sent")
        at = 0
        for part in self.slices:
            rows = part.end - part.first
            part.ticket.put(part.first, {name: array[at : at + rows] for name, array in outputs.items()})
            at += rows

    def fail(self, error: Failed) -> None:
        """Answer all its tickets with an error."""
        for part in self.slices:
            part.ticket.fail(error)
