"""Lowering for one queue per directed edge, action by action: the reference of the form on arrays."""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate

from drumline.core import rules
from drumline.core.action import Action
from drumline.core.program import Row
from drumline.core.prove.index import Index, RowPosition


def lowered_rows(index: Index, ahead: int) -> tuple[Row, ...]:
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
