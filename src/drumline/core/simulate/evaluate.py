"""When every node of a graph starts and ends, for one set of costs or for many at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from drumline.core.graph import Floats, Ints, NotCompilable, TimeGraph

_UNKNOWN = math.inf
BLOCK = 256  # samples at a time


def evaluate(graph: TimeGraph, seconds: Floats, lag: Floats) -> Floats:
    """Return every node's end; raise NotCompilable if nodes wait for each other.

    Sweeps over the chains repeatedly and advances every chain as far as its needs allow.
    """
    ends = [_UNKNOWN] * graph.num_nodes + [0.0]
    sweep, columns = _sweep, [graph.need.tolist(), seconds.tolist()]
    if lag.any():
        sweep, columns = _sweep_with_lag, [*columns, lag.tolist()]
    halted = []
    for low, high in graph.chains:
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


def starts_of(graph: TimeGraph, ended: Floats, lag: Floats) -> Floats:
    """Return every node's start by the same maximum: a node that follows without a gap starts at that exact end."""
    padded = np.append(ended, 0.0)
    started: Floats = np.maximum(padded[graph.before], padded[graph.need] + lag)
    return started


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


@dataclass(frozen=True, slots=True)
class Levels:
    """A graph's nodes in an order in which each comes after all that it waits for.

    Nodes at the end of equally long chains never wait for each other: they make a level, and lie side by side.
    `need` and `before` are places in this order; the place after the last node is the start of time.
    """

    order: Ints
    need: Ints
    before: Ints
    bounds: tuple[tuple[int, int], ...]
    last: Ints  # the places of the chains' last nodes


def levels_of(graph: TimeGraph) -> Levels:
    """Return a graph's levels; raise NotCompilable if nodes wait for each other."""
    level = evaluate(graph, np.ones(graph.num_nodes), np.zeros(graph.num_nodes)).astype(np.int64)
    order = np.argsort(level, kind="stable")
    starts = np.flatnonzero(np.diff(level[order], prepend=0)).tolist()
    place = np.full(graph.num_nodes + 1, graph.num_nodes)
    place[order] = np.arange(graph.num_nodes)
    last = np.array([high - 1 for low, high in graph.chains if low < high], dtype=np.int64)
    bounds = tuple(zip(starts, [*starts[1:], graph.num_nodes], strict=True))
    return Levels(order, place[graph.need[order]], place[graph.before[order]], bounds, place[last])


def latest_ends(levels: Levels, seconds: Floats, lag: Floats | None = None) -> Floats:
    """Return the end of the last node for many samples at once; nodes are in the order of the levels.

    Arrays are (nodes, samples), or (nodes, 1) if shared. Each level is one vector operation, over as many samples as
    a processor's cache holds.
    """
    samples = max(seconds.shape[1], 1 if lag is None else lag.shape[1])
    latest = np.empty(samples)
    for first in range(0, samples, BLOCK):
        block = slice(first, min(first + BLOCK, samples))
        own = seconds if seconds.shape[1] == 1 else seconds[:, block]
        late = lag if lag is None or lag.shape[1] == 1 else lag[:, block]
        latest[block] = _latest(levels, own, late, block.stop - first)
    return latest


def _latest(levels: Levels, seconds: Floats, lag: Floats | None, samples: int) -> Floats:
    ends = np.zeros((len(seconds) + 1, samples))
    widest = max((high - low for low, high in levels.bounds), default=0)
    needed, earlier = np.empty((2, widest, samples))
    for low, high in levels.bounds:
        time, other = needed[: high - low], earlier[: high - low]
        ends.take(levels.need[low:high], axis=0, out=time, mode="clip")
        if lag is not None:
            time += lag[low:high]
        ends.take(levels.before[low:high], axis=0, out=other, mode="clip")
        np.maximum(time, other, out=time)
        np.add(time, seconds[low:high], out=ends[low:high])
    result: Floats = ends[levels.last].max(axis=0, initial=0.0)
    return result
