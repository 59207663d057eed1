"""Sends and receives spelled out: what a channel needs to be told, in an order that cannot hang.

A message is sent right behind the action that made it. For a channel with one queue per directed edge, receives are
posted in the order in which their sender sends, as early as that order asks for, and otherwise so that at most `ahead`
of an edge are open, that is posted and not taken up.

Why this cannot hang if the compute order cannot: a receive never stands behind the action that takes its message or any
later message of the edge, so waiting for the edge's order is waiting for the sender's row and nothing else.

On fewer queues an early receive keeps other messages waiting and may hang. For these, see `one_order`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from drumline.core import rules
from drumline.core.action import Action
from drumline.core.channel import Queues
from drumline.core.errors import ProgramError
from drumline.core.one_order import in_one_order
from drumline.core.program import Program, Row
from drumline.core.prove.index import Index, Place
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram


def lower(program: Program, *, ahead: int = 2, channel: str = Queues.EDGE) -> Program:
    r"""Return the program with its communication spelled out; one that has it already comes back as it is.

    `channel` is what the messages will travel on (see `validate`): "edge" for Drumline's own transports, "rank" for a
    file that PyTorch is to run. `ahead` bounds the open receives of an edge; with "pair" and "rank" none is early.

    >>> print(lower(Program.parse("0F0,0B0\n1F0,1B0")))
    0RECV_B0,0F0,0SEND_F0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    >>> print(lower(Program.parse("0F0,0B0\n1F0,1B0"), channel="rank"))
    0F0,0SEND_F0,0RECV_B0,0B0
    1RECV_F0,1F0,1B0,1SEND_B0
    """
    if ahead < 1:
        raise ProgramError(f"ahead is {ahead}", expected="1 or more receives to be open at once")
    queues = Queues.of(channel)
    if violations := validate(program, channel=queues):
        raise InvalidProgram(program.name, violations)
    if program.has_communication:
        return program
    index = Index(program, program.placement)
    if queues is not Queues.EDGE:
        lowered = Program.of(in_one_order(index), program.name)
        if violations := validate(lowered, channel=queues):
            raise InvalidProgram(program.name, violations)
        return lowered
    return Program(_receives_ahead(index, ahead), program.name)


def _receives_ahead(index: Index, ahead: int) -> tuple[Row, ...]:
    """Return the rows with receives as early as one queue per directed edge allows."""
    program = index.program
    sends: dict[Place, list[Action]] = defaultdict(list)
    edges: dict[tuple[int, int], list[tuple[Place, Action, int]]] = defaultdict(list)
    for action, inputs in index.inputs.items():
        taken = index.places[action][0]
        for producer, made in inputs:
            if made.rank != taken.rank:
                message = rules.message(producer, program.num_stages)
                assert message is not None
                sends[made].append(message.send)
                edges[made.rank, taken.rank].append((made, message.recv, taken.position))
    receives: dict[Place, list[Action]] = defaultdict(list)
    for (_, target), messages in sorted(edges.items()):
        # Within one overlapped pair activations leave before gradients, here as in the sends below.
        messages.sort(key=lambda message: (message[0], rules.leaves_late(message[1])))
        for position, (_, recv, _) in zip(_posting([at for *_, at in messages], ahead), messages, strict=True):
            receives[Place(target, position)].append(recv)
    rows = []
    for rank, row in enumerate(program.rows):
        lowered: list[Action] = []
        for at, action in enumerate(row):
            lowered += receives[Place(rank, at)]
            lowered.append(action)
            lowered += sorted(sends[Place(rank, at)], key=rules.leaves_late)
        rows.append(tuple(lowered))
    return tuple(rows)


def _posting(taken: list[int], ahead: int) -> list[int]:
    """Return before which position each of an edge's receives is posted, given where its message is taken up.

    >>> _posting([4, 6, 8, 10], ahead=2)
    [0, 0, 5, 7]
    """
    latest = list(accumulate(reversed(taken), min))[::-1]
    consumed = sorted(taken)
    return [min(latest[number], consumed[number - ahead] + 1 if number >= ahead else 0) for number in range(len(taken))]
