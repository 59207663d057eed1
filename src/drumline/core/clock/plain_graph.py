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
    NotCompilable,
    TimeGraph,
    Waits,
)
from drumline.core.kernel.library import kernel, pointer


def plain_graph(work: Columns, num_stages: int, num_microbatches: int, producer: Ints) -> TimeGraph:
    """Return the graph; `producer` makes the input of each action. Raise NotCompilable if a row has it too late."""
    count, lengths = len(work.code), np.array(work.lengths, dtype=np.int64)
    last = np.cumsum(lengths)
    before, need, crossing, crossings, plain = (_by_kernel if kernel() else _by_columns)(work, num_stages, producer)
    node = np.arange(count)
    nothing = np.empty(0, dtype=np.int64)
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
        crossings,
        Exchanges(nothing, nothing, nothing, nothing),
        Waits(nothing, nothing, nothing, nothing),
        plain,
    )


_Parts = tuple[Ints, Ints, Ints, Crossings, bool]


def _by_kernel(work: Columns, num_stages: int, producer: Ints) -> _Parts:
    library, count = kernel(), len(work.code)
    assert library is not None
    before, need, crossing, *ends = np.empty((7, count), dtype=np.int64)
    home, flags = np.empty(num_stages, dtype=np.int64), np.zeros(1, dtype=np.uint8)
    columns = [pointer(column) for column in (work.code, work.stage, work.rank, PLACE)]
    results = [pointer(each) for each in (producer, home, before, need, crossing, *ends)]
    messages = library.plain_graph(count, *columns, num_stages, *results, pointer(flags))
    if messages < 0:
        raise NotCompilable
    makers, takers, source, target = (
        end[:messages] if 2 * messages > count else end[:messages].copy() for end in ends
    )  # without what was room for more
    nowhere = np.full(messages, -1)
    return before, need, crossing, Crossings(makers, takers, source, target, nowhere, nowhere), bool(flags[0])


def _by_columns(work: Columns, num_stages: int, producer: Ints) -> _Parts:
    """Return the same, without a kernel."""
    number = np.arange(len(work.code))
    same_row = np.append(False, work.rank[1:] == work.rank[:-1])[: len(number)]
    consumer = np.flatnonzero(producer >= 0)
    crosses = work.rank[producer[consumer]] != work.rank[consumer]
    local, remote = consumer[~crosses], consumer[crosses]
    if np.any(producer[local] >= local):
        raise NotCompilable
    need, crossing = np.full((2, len(number)), -1)
    makers = producer[remote]
    need[remote], crossing[remote] = makers, np.arange(len(remote))
    nowhere = np.full(len(remote), -1)
    crossings = Crossings(makers, remote, work.rank[makers], work.rank[remote], nowhere, nowhere)
    return np.where(same_row, number - 1, -1), need, crossing, crossings, is_plain(work, num_stages)


def is_plain(work: Columns, num_stages: int) -> bool:
    """Whether rows without exchanges and WAITs break no other rule, if they can be compiled.

    The validator checks the rest, which is rare and small: updates, parameter state, and stages on several ranks.
    """
    home = np.full(num_stages, -1)
    home[work.stage] = work.rank
    return bool((PLACE[work.code] >= 0).all()) and bool((home[work.stage] == work.rank).all())
