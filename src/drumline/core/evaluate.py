"""When every node of a graph starts and ends, for one set of costs or for many at once."""

from __future__ import annotations

import math

import numpy as np

from drumline.core.graph import Floats, Graph, NotCompilable


def evaluate(graph: Graph, seconds: Floats, lag: Floats) -> tuple[Floats, Floats]:
    """Return every node's start and end; raise NotCompilable if nodes wait for each other.

    Sweeps over the chains, each time running every chain as far as its needs allow. An end that is not known yet is
    infinite, so one comparison finds both a later input and a missing one.
    """
    need, unknown = graph.need.tolist(), math.inf
    columns = (range(graph.num_nodes), need, lag.tolist(), seconds.tolist())
    ends = [unknown] * graph.num_nodes + [0.0]
    halted = []
    for low, high in graph.chains:
        if low < high:
            nodes = zip(*(column[low:high] for column in columns), strict=True)
            halted.append((0.0, nodes, *next(nodes)))
    while halted:
        before, halted = halted, []
        for chain in before:
            time, nodes, node, needed, wait, cost = chain
            ready = ends[needed] + wait
            if ready == unknown:
                halted.append(chain)
                continue
            ends[node] = time = (ready if ready > time else time) + cost
            for node, needed, wait, cost in nodes:
                ready = ends[needed] + wait
                if ready > time:
                    if ready == unknown:
                        halted.append((time, nodes, node, needed, wait, cost))
                        break
                    time = ready
                ends[node] = time = time + cost
        if len(halted) == len(before) and all(map(_is, halted, before)):
            raise NotCompilable
        # Down the ranks and up again, as activations and gradients flow.
        halted.reverse()
    ended = np.array(ends)
    # The same maximum as above: an action that follows another without a gap starts at its end, bit for bit.
    started = np.maximum(ended[graph.before], ended[graph.need] + lag)
    return started, ended[:-1]


def _is(one: object, other: object) -> bool:
    return one is other


def evaluate_many(graph: Graph, seconds: Floats, lag: Floats) -> Floats:
    """Return every node's end for many samples at once: arrays are (nodes, samples), or (nodes, 1) if shared.

    Nodes at the end of equally long chains do not wait for each other, so each such level is one vector operation.
    """
    level = evaluate(graph, np.ones(graph.num_nodes), np.zeros(graph.num_nodes))[1].astype(np.int64)
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
