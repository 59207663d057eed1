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
from itertools import accumulate

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.channel import Queues
from drumline.core.errors import ProgramError
from drumline.core.program import Program, Row
from drumline.core.prove import exchanges, messages
from drumline.core.prove.index import Index, RowPosition
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram


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
    index = Index(program, program.placement)
    if queues is not Queues.EDGE:
        lowered = Program.of(_PaperRun(index).to_the_end(), program.name)
        if violations := validate(lowered, channel=queues):
            raise InvalidProgram(program.name, violations)
        return lowered
    return Program(_receives_ahead(index, ahead), program.name)


def _receives_ahead(index: Index, ahead: int) -> tuple[Row, ...]:
    """Return the rows with receives as early as one queue per directed edge allows."""
    sends: dict[RowPosition, list[Action]] = defaultdict(list)
    edges: dict[tuple[int, int], list[tuple[RowPosition, Action, int]]] = defaultdict(list)
    for message, row_position, taken in index.messages():
        sends[row_position].append(message.send)
        edges[row_position.rank, taken.rank].append((row_position, message.recv, taken.at))
    receives: dict[RowPosition, list[Action]] = defaultdict(list)
    for (_, target), passing in sorted(edges.items()):
        # In an overlapped pair, activations leave before gradients, here as in the sends below.
        passing.sort(key=lambda message: (message[0], rules.leaves_late(message[1])))
        for position, (_, recv, _) in zip(_posting([at for *_, at in passing], ahead), passing, strict=True):
            receives[RowPosition(target, position)].append(recv)
    rows = []
    for rank, row in enumerate(index.program.rows):
        lowered: list[Action] = []
        for at, action in enumerate(row):
            lowered += receives[RowPosition(rank, at)]
            lowered.append(action)
            lowered += sorted(sends[RowPosition(rank, at)], key=rules.leaves_late)
        rows.append(tuple(lowered))
    return tuple(rows)


def _posting(taken: list[int], ahead: int) -> list[int]:
    """Return the position before which each of an edge's receives is posted, given where its message is used.

    >>> _posting([4, 6, 8, 10], ahead=2)
    [0, 0, 5, 7]
    """
    latest = list(accumulate(reversed(taken), min))[::-1]
    consumed = sorted(taken)
    return [min(latest[number], consumed[number - ahead] + 1 if number >= ahead else 0) for number in range(len(taken))]


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
