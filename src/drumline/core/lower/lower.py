"""Lowering: write out all sends and receives, in an order that cannot hang.

A message is sent right after the action that made it. For a channel with one queue per directed edge, receives are
posted in the order in which the sender sends. They are posted as early as that order requires, and otherwise so that at
most `ahead` receives of an edge are open: posted, and not yet used.

Why this cannot hang if the compute order cannot: a receive is never posted after the action that uses its message or a
later message of the edge. So waiting in the edge's order only ever means waiting for the sender's row.

With fewer queues, an early receive blocks other messages and may hang. There, sends and receives follow one order for
all ranks, which is safe even with a single queue per rank. Lowering runs the rows once on paper and writes every event
to one list: each action when it begins, and each message when it is made. A message's send and receive get the same
moment on their two ranks. A rank's row is its part of that list.

    the list   0F0  0SEND_F0/1RECV_F0  1F0  1B0  1SEND_B0/0RECV_B0  0B0
    rank 0     0F0  0SEND_F0                               0RECV_B0  0B0
    rank 1                    1RECV_F0  1F0  1B0  1SEND_B0

Why this cannot hang on any channel: among all events still to happen, the first in the list can happen. Everything it
needs, and every message ahead of it in a queue, comes earlier in the list, and so has happened.

If the receiver is busy when the message is made, its receive moves up before the action that keeps it busy, unless
another of its messages lies in between. This changes no queue, so it is just as safe, and the message need not wait.

The durations of actions affect only how good the order is, not whether it is safe. They count as F = I = W = 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import numpy as np

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.channel import Queues
from drumline.core.clock.assemble import LEAVES_LATE, RECV_OF, SEND_OF, compile_program
from drumline.core.errors import ProgramError
from drumline.core.graph import Columns, Ints, Messages
from drumline.core.program import Program
from drumline.core.prove import exchanges, messages
from drumline.core.prove.index import Index, RowPosition
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram

_NONE_YET = Messages.LATENCY  # a graph without nodes for messages


def lower(program: Program, *, ahead: int = 2, channel: str = Queues.EDGE) -> Program:
    r"""Return the program with all sends and receives written out; a program that has them is returned unchanged.

    `channel` is what messages will travel on (see `validate`): "edge" for Drumline's own transports, "rank" for a file
    that PyTorch will run. `ahead` limits the open receives per edge; with "pair" and "rank" no receive is early.

    >>> print(lower(Program.parse("0F0,0B0\n1F0,1B0")))
    0RECV_B0,0F0,0SEND_F0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    >>> print(lower(Program.parse("0F0,0B0\n1F0,1B0"), channel="rank"))
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    if ahead < 1:
        raise ProgramError(f"ahead is {ahead}", expected="1 or more, the number of receives open at once")
    queues = Queues.of(channel)
    if violations := validate(program, channel=queues):
        raise InvalidProgram(program.name, violations)
    if program.has_communication:
        return program
    if queues is not Queues.EDGE:
        lowered = program.rearranged(_PaperRun(Index(program, program.placement)).to_the_end())
        if violations := validate(lowered, channel=queues):
            raise InvalidProgram(program.name, violations)
        return lowered
    return Program.of_columns(_receives_ahead(program, ahead), program.name)


def _receives_ahead(program: Program, ahead: int) -> Columns:
    """Return the rows with receives as early as one queue per directed edge allows."""
    columns, work, crossings = program.columns, program.timed_columns, compile_program(program, _NONE_YET).crossings
    producer, consumer = crossings.producer, crossings.consumer
    entry = np.flatnonzero(columns.timed)  # of each timed plain action, among all
    maker_cell, taker_cell = columns.cell[entry[producer]], columns.cell[entry[consumer]]
    # In an overlapped pair, activations leave before gradients, here as in the sends below.
    late = LEAVES_LATE[work.code[producer]]
    edge = crossings.source.astype(np.int64) * columns.num_ranks + crossings.target
    passing = np.lexsort((late, maker_cell, edge))
    first = np.cumsum((0, *columns.lengths))[crossings.target[passing]]
    posted = _posting(edge[passing], taker_cell[passing], first, ahead)
    sending = np.argsort(late, kind="stable")
    maker, sender = producer[passing], producer[sending]
    parts = (  # receives come before the action of the same cell, sends after it
        (posted, 0, work.stage[consumer[passing]], RECV_OF[work.code[maker]], work.microbatch[maker]),
        (columns.cell, 1, columns.stage, columns.code, columns.microbatch),
        (maker_cell[sending], 2, work.stage[sender], SEND_OF[work.code[sender]], work.microbatch[sender]),
    )
    order = np.argsort(np.concatenate([3 * part[0].astype(np.int64) + part[1] for part in parts]), kind="stable")
    numbers = np.stack([np.concatenate([part[field] for part in parts])[order] for field in (2, 3, 4)])
    alone = np.zeros(len(passing), dtype=bool)
    second = np.concatenate((alone, ~columns.heads, alone))[order]
    paired = np.concatenate((alone, columns.paired, alone))[order]
    ends = np.concatenate((crossings.source, crossings.target))
    lengths = np.array(columns.lengths) + np.bincount(ends, minlength=columns.num_ranks)
    return Columns.spread(lengths.tolist(), numbers, np.cumsum(~second) - 1, paired, columns.num_slices)


def _posting(edge: Ints, taken: Ints, first: Ints, ahead: int) -> Ints:
    """Return the place before which each receive is posted, given where its message is used; edge by edge, in order.

    `first` is the first place of the receiver's row.

    >>> nothing = np.zeros(4, dtype=np.int64)
    >>> _posting(nothing, np.array([4, 6, 8, 10]), nothing, ahead=2).tolist()
    [0, 0, 5, 7]
    """
    _, group, counts = np.unique(edge, return_inverse=True, return_counts=True)
    offset = group * (int(taken.max(initial=0)) + 1)  # so that what comes later of other edges is larger
    latest = np.minimum.accumulate((taken + offset)[::-1])[::-1] - offset
    consumed = taken[np.lexsort((taken, group))]
    number = np.arange(len(taken)) - np.repeat(np.cumsum(counts) - counts, counts)
    free = np.where(number >= ahead, consumed[np.maximum(np.arange(len(taken)) - ahead, 0)] + 1, first)
    earliest: Ints = np.minimum(latest, free)
    return earliest


_SECONDS = {Op.FORWARD: 1, Op.BACKWARD: 2, Op.BACKWARD_INPUT: 1, Op.BACKWARD_WEIGHT: 1, Op.OVERLAP: 3}
_MESSAGE, _ACTION = 0, 1  # at one moment messages come first: no action separates a message from what made it


class _PaperRun:
    r"""The rows of a valid program, run on paper.

    >>> program = Program.parse("0F0,0B0\n1F0,1B0")
    >>> _PaperRun(Index(program, program.placement)).to_the_end()
    [[0F0, 0SEND_F0, 0RECV_B0, 0B0], [1RECV_F0, 1F0, 1B0, 1SEND_B0]]
    """

    def __init__(self, index: Index) -> None:
        self.rows: Sequence[Sequence[Action]] = index.program.rows
        self.written: list[list[Action]] = [[] for _ in self.rows]
        self.messages_after: dict[RowPosition, list[tuple[rules.Message, int]]] = defaultdict(list)
        self.needs: dict[RowPosition, list[Action | RowPosition]] = defaultdict(list)
        for message, position, taken in index.messages():
            self.messages_after[position].append((message, taken.rank))
            self.needs[taken].append(message.recv)
        for needed in (exchanges.waits_for_exchange(index), messages.waits(index)):
            for place, others in needed.items():
                self.needs[place] += others
        self.at = [0] * len(self.rows)
        self.free = [0] * len(self.rows)
        self.happened: set[Action | RowPosition] = set()
        self.waiting: dict[Action | RowPosition, list[int]] = defaultdict(list)
        # The number after moment and kind breaks ties, so the order is unique.
        self.events: list[tuple[int, int, int, int, rules.Message | None, int]] = []
        self.count = 0

    def to_the_end(self) -> list[list[Action]]:
        """Process all events and return the rows with their messages written out."""
        self.wake(range(len(self.rows)), 0)
        while self.events:
            now, kind, _, rank, message, target = heappop(self.events)
            if kind == _ACTION:
                self.begin(rank, now)
            else:
                assert message is not None
                self.written[rank].append(message.send)
                row = self.written[target]
                row.insert(len(row) - (row != [] and row[-1].is_compute), message.recv)
                self.happen(message.recv, now)
        assert self.at == [len(row) for row in self.rows], "a valid program runs to its end"
        return self.written

    def begin(self, rank: int, now: int) -> None:
        """Log a rank's next action, and when its messages will be made."""
        place = RowPosition(rank, self.at[rank])
        action = self.rows[rank][place.at]
        self.written[rank].append(action)
        self.at[rank] += 1
        self.free[rank] = now + _SECONDS.get(action.op, 0)
        # In an overlapped pair, activations leave before gradients.
        for message, target in sorted(self.messages_after[place], key=lambda pair: rules.leaves_late(pair[0].send)):
            self.push(self.free[rank], _MESSAGE, rank, message, target)
        self.happen(place, now)
        self.wake([rank], now)

    def happen(self, what: Action | RowPosition, now: int) -> None:
        self.happened.add(what)
        self.wake(self.waiting.pop(what, ()), now)

    def wake(self, ranks: Iterable[int], now: int) -> None:
        """Let ranks begin their next action, or wait for their first missing input."""
        for rank in ranks:
            if self.at[rank] == len(self.rows[rank]):
                continue
            inputs = self.needs.get(RowPosition(rank, self.at[rank]), ())
            missing = next((action for action in inputs if action not in self.happened), None)
            if missing is None:
                self.push(max(self.free[rank], now), _ACTION, rank)
            else:
                self.waiting[missing].append(rank)

    def push(self, moment: int, kind: int, rank: int, message: rules.Message | None = None, target: int = -1) -> None:
        self.count += 1
        heappush(self.events, (moment, kind, self.count, rank, message, target))
