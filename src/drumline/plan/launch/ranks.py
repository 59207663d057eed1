"""Which rank is which: the order of the axes on the cluster, and the links that each of them crosses.

The rule: **tensor innermost, then context, then data, and the pipeline outermost**. Tensor parallelism talks in every
layer and stays inside a node; a pipeline talks least, once per stage and microbatch, and takes what is farthest. Rank
((p x DP + d) x CP + c) x TP + t is that of stage p, replica d, context piece c and tensor piece t.

    16 devices in nodes of 8, TP4 PP2 DP2:   node 0   d0: t0 t1 t2 t3   d1: t0 t1 t2 t3    p0
                                             node 1   d0: t0 t1 t2 t3   d1: t0 t1 t2 t3    p1

It is what Megatron-LM calls tp-cp-ep-dp-pp and torchtitan's mesh pp, dp, cp, tp, so both place ranks alike.
"""

from __future__ import annotations

from typing import NamedTuple

from drumline.core.errors import PlanError
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout

AXES = ("tensor", "context", "data", "pipeline")


class Place(NamedTuple):
    """Where a rank lies, and which part of the work it has."""

    node: int
    tensor: int
    context: int
    data: int
    pipeline: int


def place(layout: Layout, cluster: Cluster, rank: int) -> Place:
    """Return the place of a rank.

    >>> from drumline.plan.cluster.hardware import Device, Link
    >>> link = Link(1e-5, 1e11)
    >>> cluster = Cluster(Device("fast", 1e15, 2**36, 1e12), 16, 8, link, link)
    >>> place(Layout(batch=4, tensor=4, pipeline=2, data=2), cluster, 13)
    Place(node=1, tensor=1, context=0, data=1, pipeline=1)
    """
    if not 0 <= rank < layout.num_devices:
        raise PlanError(f"rank {rank} of {layout.num_devices}", expected=f"0 to {layout.num_devices - 1}")
    rest, tensor = divmod(rank, layout.tensor)
    rest, context = divmod(rest, layout.context)
    pipeline, data = divmod(rest, layout.data)
    return Place(rank // cluster.devices_per_node, tensor, context, data, pipeline)


def first_places(layout: Layout, cluster: Cluster) -> dict[int, Place]:
    """Return the places of the ranks of the first nodes of the first two stages, enough to see the order."""
    per_node, stride = cluster.devices_per_node, layout.tensor * layout.context * layout.data
    nodes = sorted({start // per_node + more for start in (0, stride) for more in (0, 1)})
    ranks = (rank for node in nodes for rank in range(node * per_node, (node + 1) * per_node))
    return {rank: place(layout, cluster, rank) for rank in ranks if rank < layout.num_devices}


def links(layout: Layout, cluster: Cluster) -> dict[str, str]:
    """Return for every axis with more than one rank whether its groups stay inside a node.

    >>> from drumline.plan.cluster.hardware import Device, Link
    >>> link = Link(1e-5, 1e11)
    >>> cluster = Cluster(Device("fast", 1e15, 2**36, 1e12), 16, 8, link, link)
    >>> links(Layout(batch=4, tensor=4, pipeline=2, data=2), cluster)
    {'tensor': 'inside a node', 'data': 'inside a node', 'pipeline': 'between nodes'}
    """
    inside, found = 1, {}
    for axis in AXES:
        size = getattr(layout, axis)
        inside *= size
        if size > 1:
            # A group that divides no node evenly crosses from one to the next somewhere.
            stays = inside <= cluster.devices_per_node and cluster.devices_per_node % inside == 0
            found[axis] = "inside a node" if stays else "between nodes"
    return found
