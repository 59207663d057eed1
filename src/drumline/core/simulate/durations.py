"""Apply costs to a graph: how long every node takes, and how long after its need it may start."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from drumline.core import rules
from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.graph import CODE, OPS, PLACE, Floats, Ints, Messages, TimeGraph
from drumline.core.kernel.library import kernel

COMPUTES = (PLACE >= 0).astype(np.uint8)
_FIELDS = {op: op.name.lower() for op in (*rules.NEEDS, Op.UPDATE)}


def work_seconds(graph: TimeGraph, many: Sequence[Costs]) -> Floats:
    """Return the seconds of every plain action, one column per costs; a microbatch's factor does not affect updates."""
    library, work = kernel(), graph.work
    if library is not None and len(many) == 1:
        (costs,) = many
        factors = _factors(graph, costs)
        column = np.empty((len(work.code), 1))
        columns = work.code, work.stage, work.microbatch, graph.num_stages
        library.seconds(len(column), *columns, stage_table(costs, graph.num_stages), factors, COMPUTES, column)
        return _by_slice(graph, many, column)
    tables = np.stack([stage_table(costs, graph.num_stages) for costs in many], axis=2)
    slot = work.code * graph.num_stages + work.stage
    seconds: Floats = tables.reshape(-1, len(many)).take(slot, axis=0)
    if any(_factors(graph, costs) is not None for costs in many):
        ones = np.ones(graph.num_microbatches)
        each = [_factors(graph, costs) for costs in many]
        factors = np.array([ones if factor is None else factor for factor in each]).T
        computes = PLACE[work.code] >= 0
        seconds[computes] *= factors[work.microbatch[computes]]
    return _by_slice(graph, many, seconds)


def _by_slice(graph: TimeGraph, many: Sequence[Costs], seconds: Floats) -> Floats:
    """Return the seconds of slices, whose attention I and W do not share, or which each stage has its own part of."""
    work = graph.work
    if work.num_slices > 1:
        for at, costs in enumerate(many):
            seconds[:, at] += _attention_of_halves(graph, costs)
            if costs.has_stage_factors:
                computes = PLACE[work.code] >= 0
                table = np.array(costs.stage_factors(graph.num_microbatches, work.num_slices))
                seconds[computes, at] *= table[work.stage[computes], work.microbatch[computes]]
    return seconds


def _factors(graph: TimeGraph, costs: Costs) -> Floats | None:
    """Return what the seconds of every microbatch or slice are multiplied by on all stages; None if nothing is."""
    if graph.work.num_slices > 1 and costs.has_stage_factors:
        return None
    if costs.microbatch_factor == 1.0 and graph.work.num_slices == 1:
        return None
    return np.array(costs.factors(graph.num_microbatches, graph.work.num_slices))


def _attention_of_halves(graph: TimeGraph, costs: Costs) -> Floats:
    """Return what every action takes beyond its part of the whole: I has all attention of the backward, and W none.

    Where attention would need more than I takes, W has the rest.
    """
    added = np.zeros(len(graph.work.code))
    if not costs.attention or costs.slice_factor is not None:
        return added
    counts = graph.num_microbatches, graph.work.num_slices
    fewer = np.array(costs.byte_factors(*counts)) - np.array(costs.factors(*counts))  # what W has less
    halves = (costs.per_stage(name, graph.num_stages) for name in ("backward_input", "backward_weight"))
    first, second = map(np.array, halves)
    free = np.minimum(second, first * (1.0 - costs.attention) / costs.attention)
    for op, sign in ((Op.BACKWARD_INPUT, -1.0), (Op.BACKWARD_WEIGHT, 1.0)):
        chosen = graph.work.code == CODE[op]
        added[chosen] = sign * free[graph.work.stage[chosen]] * fewer[graph.work.microbatch[chosen]]
    return added


def stage_table(costs: Costs, num_stages: int) -> Floats:
    """Return the seconds of every (op, stage) at a microbatch factor of 1."""
    table = np.zeros((len(OPS), num_stages))
    for op, name in _FIELDS.items():
        value = getattr(costs, name)
        table[CODE[op]] = value if isinstance(value, float | int) else costs.per_stage(name, num_stages)
    if costs.recompute is not False:
        again = np.array(costs.recomputes(num_stages)) * table[CODE[Op.FORWARD]]
        for op in (Op.BACKWARD, Op.BACKWARD_INPUT):
            table[CODE[op]] += again
    return table


def sums(values: Floats, lengths: Sequence[int]) -> list[float]:
    """Return the sums of groups of numbers side by side, each rounded once.

    >>> sums(np.array([0.1] * 10 + [1e16, 1.0, -1e16]), [10, 3])
    [1.0, 1.0]
    """
    library, last = kernel(), np.cumsum(lengths, dtype=np.int64)
    if library is None or not np.isfinite(values).all():
        return [math.fsum(group.tolist()) for group in np.split(values, last[:-1])] if len(lengths) else []
    totals = np.empty(len(lengths))
    bounds = np.stack((last - np.array(lengths, dtype=np.int64), last), axis=1)
    library.sums(len(lengths), bounds, np.ascontiguousarray(values), totals)
    each: list[float] = totals.tolist()
    return each


def all_alike(graph: TimeGraph, costs: Costs) -> bool:
    """Whether these costs surely give the same seconds to all plain actions of an op."""
    table = stage_table(costs, graph.num_stages)
    if costs.has_stage_factors:
        return False
    factors = _factors(graph, costs)
    return (factors is None or len(set(factors.tolist())) == 1) and bool((table == table[:, :1]).all())


def level_work(graph: TimeGraph, seconds: Floats) -> Floats:
    """Return the same work spread evenly: every plain action takes the mean of its op."""
    level = seconds.copy()
    for op in rules.NEEDS:
        same = graph.work.code == CODE[op]
        if same.any():
            level[same] = seconds[same].mean()
    return level


def node_seconds(graph: TimeGraph, costs: Costs, work: Floats) -> Floats:
    """Return the seconds of every node (actions, pairs, messages, exchanges) from those of the plain actions.

    `work` may have a second axis for samples; then the result has it too.
    """
    if graph.only_work:
        return work
    seconds = np.zeros((graph.num_nodes, *work.shape[1:]))
    fused, halves = _pairs(graph)
    seconds[graph.node] = work
    if len(fused):
        seconds[fused] = work[halves].sum(axis=1)
        if costs.overlapped is not None:
            together = np.array(costs.per_stage("overlapped", graph.num_stages))[graph.work.stage[halves[:, 0]]]
            each = np.array(costs.factors(graph.num_microbatches, graph.work.num_slices))
            factor = each[graph.work.microbatch[halves]].mean(axis=1)
            seconds[fused] = (together * factor).reshape(-1, *[1] * (work.ndim - 1))
    crossings = graph.crossings
    if len(crossings.node) and graph.messages is not Messages.LATENCY:
        edges, which = graph.edges
        speed = np.array([costs.edge(source, target).bytes_per_second for source, target in edges])[which]
        moving = (message_bytes(graph, costs) / speed).reshape(-1, *[1] * (work.ndim - 1))
        seconds[crossings.node] = moving
        if graph.messages is Messages.BLOCKING:
            seconds[crossings.recv_node] = moving
    if len(graph.exchanges.node):
        for name, node in (("pack", graph.exchanges.packed), ("reduce", graph.exchanges.node)):
            each = np.array(costs.per_stage(name, graph.num_stages))[graph.exchanges.stage]
            seconds[node] = each.reshape(-1, *[1] * (work.ndim - 1))
    return seconds


def message_bytes(graph: TimeGraph, costs: Costs) -> Floats:
    """Return the bytes of every message: what crosses the boundary after a stage, the same in both directions."""
    work, crossings = graph.work, graph.crossings
    boundary = np.minimum(work.stage[crossings.producer], work.stage[crossings.consumer])
    factors = np.array(costs.byte_factors(graph.num_microbatches, work.num_slices))
    factor = factors[work.microbatch[crossings.producer]]
    sizes: Floats = np.array(costs.per_stage("message_bytes", graph.num_stages))[boundary] * factor
    return sizes


def lags(graph: TimeGraph, many: Sequence[Costs], seconds: Floats) -> Floats | None:
    """Return how long after its need every node may start, one column per costs; None if none has to wait.

    `seconds` are those of the nodes.
    """
    blocks = graph.messages is Messages.BLOCKING
    if (not blocks and all(costs.comm == 0 and not costs.edges for costs in many)) or not len(graph.crossings.node):
        return None
    edges, which = graph.edges
    latencies = np.array([[costs.edge(*edge).latency for costs in many] for edge in edges])
    nothing = np.zeros((1, len(many)))
    if not blocks:
        return np.concatenate([latencies, nothing]).take(graph.node_edge, axis=0)
    # A receive runs alongside its send, `latency` later, and not only after it.
    waits: Floats = np.vstack([latencies[which] - seconds[graph.crossings.node], nothing])[graph.crossing]
    return waits


def _pairs(graph: TimeGraph) -> tuple[Ints, Ints]:
    """Return the nodes of overlapped pairs, and the work indices of their two halves, forward first."""
    halves = np.flatnonzero(graph.work.paired).reshape(-1, 2)
    forward_first = graph.work.code[halves[:, 0]] == CODE[Op.FORWARD]
    halves = np.where(forward_first[:, None], halves, halves[:, ::-1])
    return graph.node[halves[:, 0]], halves
