"""The clock in Python: what the kernel computes, with the same bits, where no kernel was compiled."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from drumline.core.graph import Floats, Ints, NotCompilable, TimeGraph

_UNKNOWN = math.inf
_BLOCK = 200_000  # ends at a time: a processor's cache holds them


def ends_in_python(graph: TimeGraph, seconds: Floats, lag: Floats | None) -> Floats:
    """Return every node's end; raise NotCompilable if nodes wait for each other.

    Sweeps over the chains repeatedly and advances every chain as far as its needs allow.
    """
    ends = [_UNKNOWN] * graph.num_nodes + [0.0]
    sweep, columns = _sweep, [graph.need.tolist(), seconds.tolist()]
    if lag is not None and lag.any():
        sweep, columns = _sweep_with_lag, [*columns, lag.tolist()]
    halted = []
    for low, high in graph.chains.tolist():
        if low < high:
            nodes = zip(range(low, high), *(column[low:high] for column in columns), strict=True)
            halted.append((0.0, nodes, *next(nodes)))
    while halted:
        halted, moved = sweep(halted, ends)
        if not moved:
            raise NotCompilable
        # Down the ranks and up again, like activations and gradients.
        halted.reverse()
    ends.pop()
    return np.fromiter(ends, np.float64, graph.num_nodes)


def _sweep(chains: list[Any], ends: list[float]) -> tuple[list[Any], bool]:
    """Advance every halted chain; return those that halt again, and whether any moved.

    An unknown end is infinite, so a single comparison finds both a later input and a missing one.
    """
    halted, moved = [], False
    for chain in chains:
        time, nodes, node, need, cost = chain
        ready = ends[need]
        if ready == _UNKNOWN:
            halted.append(chain)
            continue
        moved = True
        ends[node] = time = (ready if ready > time else time) + cost
        for node, need, cost in nodes:
            ready = ends[need]
            if ready > time:
                if ready == _UNKNOWN:
                    halted.append((time, nodes, node, need, cost))
                    break
                time = ready
            ends[node] = time = time + cost
    return halted, moved


def _sweep_with_lag(chains: list[Any], ends: list[float]) -> tuple[list[Any], bool]:
    """Do the same when needs take time to arrive; a separate function, because the lag costs a quarter of the speed."""
    halted, moved = [], False
    for chain in chains:
        time, nodes, node, need, cost, lag = chain
        ready = ends[need] + lag
        if ready == _UNKNOWN:
            halted.append(chain)
            continue
        moved = True
        ends[node] = time = (ready if ready > time else time) + cost
        for node, need, cost, lag in nodes:
            ready = ends[need] + lag
            if ready > time:
                if ready == _UNKNOWN:
                    halted.append((time, nodes, node, need, cost, lag))
                    break
                time = ready
            ends[node] = time = time + cost
    return halted, moved


class Levels(NamedTuple):
    """A graph's nodes in an order in which each comes after all that it waits for.

    Nodes at the end of equally long chains never wait for each other: they make a level, and lie side by side. `each`
    are the levels: the first place, the place after the last, and the places of the nodes' needs, followed by those of
    the nodes before them. The place after the last node is the start of time.
    """

    order: Ints
    each: tuple[tuple[int, int, Ints], ...]
    last: Ints  # the places of the chains' last nodes
    widest: int  # nodes of a level


def levels_of(graph: TimeGraph) -> Levels:
    """Return a graph's levels; raise NotCompilable if nodes wait for each other."""
    level = ends_in_python(graph, np.ones(graph.num_nodes), None).astype(np.int64)
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=0)).tolist()
    place = np.full(graph.num_nodes + 1, graph.num_nodes)
    place[order] = np.arange(graph.num_nodes)
    need, before = place[graph.need[order]], place[graph.before[order]]
    bounds = zip(starts, [*starts[1:], graph.num_nodes], strict=True)
    each = tuple((low, high, np.concatenate([need[low:high], before[low:high]])) for low, high in bounds)
    last = np.array([high - 1 for low, high in graph.chains.tolist() if low < high], dtype=np.int64)
    return Levels(order, each, place[last], max((high - low for low, high, _ in each), default=0))


def latest_in_python(levels: Levels, seconds: Floats, rows: Ints, lag: Floats | None = None) -> Floats:
    """Return the end of the last node for many samples at once; `rows` are the nodes' rows of `seconds`.

    Arrays are (rows, samples), or (rows, 1) if shared; nodes are in the order of the levels, and so is `lag`. Each
    level is one vector operation over many samples.
    """
    samples = max(seconds.shape[1], 1 if lag is None else lag.shape[1])
    latest = np.empty(samples)
    number = max(_BLOCK // max(len(rows), 1), 16)
    for first in range(0, samples, number):
        block = slice(first, min(first + number, samples))
        each = seconds if seconds.shape[1] == 1 else np.ascontiguousarray(seconds[:, block])
        late = lag if lag is None or lag.shape[1] == 1 else lag[:, block]
        latest[block] = _latest(levels, each, rows, late, block.stop - first)
    return latest


def _latest(levels: Levels, seconds: Floats, rows: Ints, lag: Floats | None, samples: int) -> Floats:
    ends = np.zeros((len(rows) + 1, samples))
    waits, costs = np.empty((2 * levels.widest, samples)), np.empty((levels.widest, seconds.shape[1]))
    for low, high, places in levels.each:
        count = high - low
        both = waits[: 2 * count]
        ends.take(places, axis=0, out=both, mode="clip")
        time = both[:count]
        if lag is not None:
            time += lag[low:high]
        np.maximum(time, both[count:], out=time)
        np.add(time, seconds.take(rows[low:high], axis=0, out=costs[:count], mode="clip"), out=ends[low:high])
    result: Floats = ends[levels.last].max(axis=0, initial=0.0)
    return result
