"""When every node of a graph starts and ends, for one set of costs or for many at once.

The compiled kernel computes it, or the Python form if there is no kernel: with the same bits, some 100 times slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from drumline.core.graph import Floats, Ints, NotCompilable, Number, TimeGraph
from drumline.core.kernel.library import Kernel, kernel, slower

if TYPE_CHECKING:
    from drumline.core.clock.python_clock import Levels

_SIDE_BY_SIDE = 8  # samples, as in the kernel


def evaluate(graph: TimeGraph, seconds: Floats, lag: Floats | None = None) -> Floats:
    """Return every node's end; raise NotCompilable if nodes wait for each other."""
    library = kernel()
    if library is None:
        from drumline.core.clock.python_clock import ends_in_python

        slower(graph.num_nodes)
        return ends_in_python(graph, seconds, lag)
    return _ends(library, graph, seconds, lag, None)[0]


def starts_of(graph: TimeGraph, ended: Floats, lag: Floats | None, nodes: Ints | None = None) -> Floats:
    """Return the starts of all nodes, or of some, by the same maximum.

    So a node that follows another without a gap starts at that exact end.
    """
    library = kernel()
    if library is None or nodes is not None:
        return _starts(graph, ended, lag, np.arange(graph.num_nodes) if nodes is None else nodes)
    ends = np.empty(graph.num_nodes + 1)
    ends[0], ends[1:] = 0.0, ended
    starts = np.empty(graph.num_nodes)
    late = None if lag is None else np.ascontiguousarray(lag)
    library.starts(len(graph.chains), graph.chains, graph.need, late, ends, starts)
    return starts


def _starts(graph: TimeGraph, ended: Floats, lag: Floats | None, nodes: Ints) -> Floats:
    """Return when these nodes start."""
    before, need = graph.before[nodes], graph.need[nodes]
    arrived = np.where(need < 0, 0.0, ended[need])
    if lag is not None:
        arrived = arrived + lag[nodes]
    started: Floats = np.maximum(np.where(before < 0, 0.0, ended[before]), arrived)
    return started


class Order(NamedTuple):
    """A graph, and an order of its nodes in which each comes after all that it waits for.

    The kernel takes `runs` of consecutive nodes: the first, the one after the last, and the node before the first, or
    -1. The Python form takes `levels`.
    """

    graph: TimeGraph
    runs: Ints | None
    levels: Levels | None


def order_of(graph: TimeGraph) -> Order:
    """Return the order of a graph's nodes; raise NotCompilable if nodes wait for each other."""
    library = kernel()
    if library is None:
        from drumline.core.clock.python_clock import levels_of

        return Order(graph, None, levels_of(graph))
    runs = np.empty((graph.num_nodes, 3), dtype=Number)
    _, count = _ends(library, graph, np.zeros(graph.num_nodes), None, runs)
    return Order(graph, runs[:count].copy(), None)


def latest_ends(order: Order, seconds: Floats, rows: Ints | None = None, lag: Floats | None = None) -> Floats:
    """Return the end of the last node for many samples at once.

    `seconds` and `lag` are (rows, samples), or (rows, 1) if shared. `rows` says which row of `seconds` each node takes;
    without it, there is one for every node.
    """
    library, graph, runs = kernel(), order.graph, order.runs
    samples = max(seconds.shape[1], 1 if lag is None else lag.shape[1])
    if library is None or runs is None:
        from drumline.core.clock.python_clock import latest_in_python, levels_of

        levels = order.levels or levels_of(graph)
        slower(graph.num_nodes * samples // 100)  # many samples at once are a hundredth of the work
        if rows is None:
            rows = np.arange(graph.num_nodes)
        return latest_in_python(levels, seconds, rows[levels.order], None if lag is None else lag[levels.order])
    seconds, late = np.ascontiguousarray(seconds), None if lag is None else np.ascontiguousarray(lag)
    latest, ends = np.empty(samples), np.empty((graph.num_nodes + 1) * _SIDE_BY_SIDE)
    chosen = None if rows is None else np.ascontiguousarray(rows, dtype=Number)
    table = graph.chains, graph.need, chosen, seconds, seconds.shape[1]
    lags = late, 1 if late is None else late.shape[1]
    library.latest(len(runs), runs, len(graph.chains), *table, *lags, samples, ends, latest)
    return latest


def _ends(
    library: Kernel, graph: TimeGraph, seconds: Floats, lag: Floats | None, runs: Ints | None
) -> tuple[Floats, int]:
    """Return every node's end and the number of runs that it took."""
    ends = np.empty(graph.num_nodes + 1)
    late = None if lag is None else np.ascontiguousarray(lag)
    times = np.ascontiguousarray(seconds), late, ends
    count = library.clock(graph.num_nodes, len(graph.chains), graph.chains, graph.need, *times, runs)
    if count == Kernel.OUT_OF_MEMORY:
        raise MemoryError(f"no memory to time {graph.num_nodes} actions and messages")
    if count < 0:
        raise NotCompilable
    return ends[1:], count
