"""What follows from the times of many actions at once: the critical path, queues, and receive buffers, in arrays."""

from __future__ import annotations

import numpy as np

from drumline.core.costs import Costs
from drumline.core.graph import Floats, Ints, Messages, Number, TimeGraph
from drumline.core.kernel.library import kernel
from drumline.core.simulate.durations import message_bytes


def critical_nodes(graph: TimeGraph, started: Floats, ended: Floats) -> Ints | None:
    """Return the nodes that determine the makespan, in order; None if rows do more than compute and send at once."""
    whole = graph.only_work and sum(map(len, graph.action_nodes)) == graph.num_nodes
    if graph.messages is not Messages.LATENCY or not whole or len(graph.exchanges.node):
        return None
    first, last = graph.chains.T
    lasts = last[first < last] - 1
    if not len(lasts):
        return None
    node, library, rank = int(lasts[ended[lasts].argmax()]), kernel(), graph.work.rank
    if library is not None:
        path = np.empty(graph.num_nodes, dtype=Number)
        return path[: library.path(node, rank, graph.need, started, np.ascontiguousarray(ended), path)][::-1].copy()
    nodes: list[int] = []
    while node >= 0:
        nodes.append(node)
        follows = node > 0 and rank[node - 1] == rank[node]
        alone = graph.need[node] < 0
        node = node - 1 if follows and (alone or ended[node - 1] >= started[node]) else int(graph.need[node])
    return np.array(nodes[::-1], dtype=Number)


def peak_queues(graph: TimeGraph, started: Floats, ended: Floats) -> dict[tuple[int, int], int]:
    """Return, per edge, how many messages were made and not yet used at once."""
    edges, which = graph.edges
    making, using = ended[graph.node[graph.crossings.producer]], started[graph.node[graph.crossings.consumer]]
    peaks = {}
    for edge, here in zip(edges, _groups(which, len(edges)), strict=True):
        change = np.repeat((1, -1), len(here))
        # What is used at the moment another is made has left before.
        order = np.lexsort((change, np.concatenate((making[here], using[here]))))
        peaks[edge] = int(np.cumsum(change[order]).max())
    return peaks


def peak_receive_bytes(graph: TimeGraph, started: Floats, ended: Floats, costs: Costs) -> tuple[float, ...]:
    """Return the most message bytes that each rank had arriving or waiting."""
    crossings, sizes = graph.crossings, message_bytes(graph, costs)
    on_their_way = crossings.node >= 0
    begun = ended[graph.node[crossings.producer]]
    begun[on_their_way] = started[crossings.node[on_their_way]]
    using, peaks = started[graph.node[crossings.consumer]], []
    for here in _groups(crossings.target, graph.num_ranks):
        change = np.concatenate((sizes[here], -sizes[here]))
        # A message that arrives at the moment another is used needs its own space.
        order = np.lexsort((-change, np.concatenate((begun[here], using[here]))))
        peaks.append(float(np.cumsum(change[order]).max(initial=0.0)) if len(here) else 0.0)
    return tuple(peaks)


def _groups(numbers: Ints, count: int) -> list[Ints]:
    """Return the places of 0, of 1, and so on."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.searchsorted(numbers[order], np.arange(1, count))) if count else []
