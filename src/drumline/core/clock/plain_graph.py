"""The graph of plain rows, without messages of their own: their actions are its nodes, with the same numbers."""

from __future__ import annotations

import numpy as np

from drumline.core.clock.producers import by_kernel, producers
from drumline.core.graph import PLACE, Columns, Ints, NotCompilable, Number, TimeGraph


def plain_graph(work: Columns, num_stages: int, num_microbatches: int) -> TimeGraph:
    """Return the graph of rows that have no overlapped pair; raise NotCompilable if they break a rule."""
    found_needs = by_kernel(work, num_stages, num_microbatches, of_other_ranks=True)
    need, plain = found_needs or _by_columns(work, num_stages, num_microbatches)
    return TimeGraph.of_plain(work, need, num_stages, num_microbatches, plain=plain)


def _by_columns(work: Columns, num_stages: int, num_microbatches: int) -> tuple[Ints, bool]:
    """Return what each action needs from another rank, or -1, and whether the rows are plain."""
    producer = producers(work, num_stages, num_microbatches)
    consumer = np.flatnonzero(producer >= 0)
    crosses = work.rank[producer[consumer]] != work.rank[consumer]
    local, remote = consumer[~crosses], consumer[crosses]
    if np.any(producer[local] >= local):
        raise NotCompilable
    need = np.full(len(producer), -1, dtype=Number)
    need[remote] = producer[remote]
    return need, is_plain(work, num_stages)


def is_plain(work: Columns, num_stages: int) -> bool:
    """Whether rows without exchanges and WAITs break no other rule, if they can be compiled.

    The validator checks the rest, which is rare and small: updates, parameter state, and stages on several ranks.
    """
    home = np.full(num_stages, -1)
    home[work.stage] = work.rank
    return bool((PLACE[work.code] >= 0).all()) and bool((home[work.stage] == work.rank).all())
