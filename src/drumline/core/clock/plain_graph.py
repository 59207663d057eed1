"""The graph of plain rows, without messages of their own: their actions are its nodes, with the same numbers."""

from __future__ import annotations

import numpy as np

from drumline.core.graph import (
    PLACE,
    Columns,
    Crossings,
    Exchanges,
    Ints,
    Messages,
    TimeGraph,
    Waits,
)
from drumline.core.program import Program


def plain_graph(program: Program, num_stages: int, num_microbatches: int, producer: Ints, consumer: Ints) -> TimeGraph:
    """Return the graph; `producer` makes the input of each action, and `consumer` are those that need it from afar."""
    work = program.columns
    count, lengths = len(work.code), np.array(work.lengths, dtype=np.int64)
    last = np.cumsum(lengths)
    need, crossing = np.full((2, count), -1)
    makers = producer[consumer]
    need[consumer], crossing[consumer] = makers, np.arange(len(consumer))
    node = np.arange(count)
    before = node - 1
    before[(last - lengths)[lengths > 0]] = -1
    nothing, nowhere = np.empty(0, dtype=np.int64), np.full(len(consumer), -1)
    return TimeGraph(
        Messages.LATENCY,
        len(lengths),
        num_stages,
        num_microbatches,
        count,
        np.stack((last - lengths, last), axis=1),
        before,
        need,
        crossing,
        tuple(np.split(node, last[:-1])),
        work,
        node,
        Crossings(makers, consumer, work.rank[makers], work.rank[consumer], nowhere, nowhere),
        Exchanges(nothing, nothing, nothing, nothing),
        Waits(nothing, nothing, nothing, nothing),
        is_plain(work, num_stages),
    )


def is_plain(work: Columns, num_stages: int) -> bool:
    """Whether rows without exchanges and WAITs break no other rule, if they can be compiled.

    The validator checks the rest, which is rare and small: updates, parameter state, and stages on several ranks.
    """
    home = np.full(num_stages, -1)
    home[work.stage] = work.rank
    return bool((PLACE[work.code] >= 0).all()) and bool((home[work.stage] == work.rank).all())
