"""When every node of a graph starts and ends, for one set of costs or for many at once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from drumline.core.graph import Floats, NotCompilable, TimeGraph

_UNKNOWN = math.inf


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


def evaluate_many(graph: TimeGraph, seconds: Floats, lag: Floats) -> Floats:
    """Return every node's end for many samples at once: arrays are (nodes, samples), or (nodes, 1) if shared.

    Nodes at the end of equally long chains never wait for each other, so each such level is one vector operation.
    """
    level = evaluate(graph, np.ones(graph.num_nodes), np.zeros(graph.num_nodes)).astype(np.int64)
    by_level = np.argsort(level, kind="stable")
    bounds = np.flatnonzero(np.diff(level[by_level], prepend=0)).tolist()
    ends = np.zeros((graph.num_nodes + 1, max(seconds.shape[1], lag.shape[1])))
    for low, high in zip(bounds, [*bounds[1:], graph.num_nodes], strict=True):
        nodes = by_level[low:high]
        time = ends[graph.need[nodes]] + lag[nodes]
        np.maximum(time, ends[graph.before[nodes]], out=time)
        time += seconds[nodes]
        ends[nodes] = time
    return ends[:-1]
