"""Which WAITs of a simulated program kept their ranks, and for what.

In 0F0,0SEND_F0,0WAIT_SEND_F0,0F1 rank 0 computes 0F1 only once rank 1 has taken 0F0's output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from drumline.core.timeline.timeline import Lane, Span

if TYPE_CHECKING:
    from drumline.core.simulate.simulate import Simulation


def awaited(timeline: Simulation) -> dict[tuple[int, int], Span]:
    r"""Return the send or exchange that each action had to wait for, by its rank and index among the timed ones.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> rows = "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1"
    >>> awaited(simulate(Program.parse(rows), Costs(message_bytes=2, bytes_per_second=1)))
    {(0, 1): Span(rank=0, action=0SEND_F0, start=1.0, end=3.0, lane=<Lane.TRANSFER: 'transfer'>)}
    """
    graph = timeline.graph
    found: dict[tuple[int, int], Span] = {}
    if not len(graph.waits.node):
        return found
    spans = dict(zip(graph.exchanges.node.tolist(), timeline.exchanges, strict=True))
    for node, one in zip(graph.crossings.node.tolist(), timeline.transfers, strict=True):
        spans[node] = Span(one.source, one.action, timeline.starts[node], timeline.ends[node], Lane.TRANSFER)
    first = np.cumsum([0, *(len(nodes) for nodes in graph.action_nodes)]).tolist()
    waits = graph.waits
    columns = (one.tolist() for one in (waits.rank, waits.node, waits.awaited, waits.follows))
    for rank, node, needed, follows in zip(*columns, strict=True):
        index = max(follows + 1 - first[rank], 0)
        track = timeline.tracks[rank]
        if needed < 0 or index == len(track.starts):
            continue
        free = track.ends[index - 1] if index else timeline.start
        if free < timeline.ends[node] == track.starts[index]:
            found[rank, index] = spans[needed]
    return found
