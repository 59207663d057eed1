"""What each rank of a pipeline does for one microbatch, and what its devices send each other in a step.

Messages are counted in bytes by purpose, and in seconds that compute does not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from drumline.plan.cluster.hardware import Cluster, Link
from drumline.plan.cluster.kernels import Ops, Spent, exposed, gather_seconds, reduce_seconds
from drumline.plan.cluster.layers import embedding_ops, head_ops, layer_ops, relevant, ring_bytes, routed_bytes
from drumline.plan.cluster.layout import Layout, recomputed_ops, whole_layers
from drumline.plan.cluster.memory import WEIGHT_BYTES, device_parameters, held_fp8, keeps_gradients
from drumline.plan.cluster.products import WORD, tokens_of
from drumline.plan.cluster.stages import Alike, StageLayers, alike, counts_of, num_sides, slices_of, stages_of
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules.formulas import Pace


@dataclass(frozen=True, slots=True)
class ExchangeCost:
    """Exposed seconds in every forward, in every backward, and once per step; and the bytes that a device sends."""

    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0
    bytes: float = 0.0


def data_exchange(
    cluster: Cluster,
    layout: Layout,
    parameters: tuple[float, float],
    forward_seconds: float,
    backward_seconds: float,
    num_layers: int = 1,
) -> ExchangeCost:
    """Return the exchange of a rank's gradients and weights; the seconds are those of one microbatch on the rank.

    A reduce-scatter sums the gradients. All sums (ZeRO 0) or the new 16-bit weights come back. ZeRO 2 keeps no whole
    gradients and sums them after every microbatch; in a pipeline it keeps them, and sums once. ZeRO 3 keeps no whole
    weights either, and gathers them before every forward and every backward, layer by layer, so every layer pays for
    the start and the latency of a collective.
    """
    reduce = gather = reduced = gathered = 0.0
    there = layout.practice.gradient_bytes
    back = there if layout.zero == 0 else WEIGHT_BYTES
    group = layout.data * layout.context
    for count, size, stride in (
        (parameters[0], group, layout.tensor),
        (parameters[1], group // layout.expert, layout.tensor * layout.expert),
    ):
        if size > 1 and count:
            link = cluster.link(size, stride)
            if layout.zero == 3:
                start, late = num_layers * link.start_seconds, num_layers * link.latency_seconds
                link = replace(link, start_seconds=start, latency_seconds=late)
            reduce += gather_seconds(link, size, there * count)
            gather += gather_seconds(link, size, back * count)
            reduced += there * count * (size - 1) / size
            gathered += back * count * (size - 1) / size
    times = layout.num_microbatches
    beside = layout.practice.overlap_data and (layout.pipeline == 1 or layout.practice.overlap_staged)
    hidden, hidden_back = (forward_seconds, backward_seconds) if beside else (0.0, 0.0)
    if layout.zero == 0:
        return ExchangeCost(once=exposed(reduce + gather, hidden_back), bytes=reduced + gathered)
    if layout.zero == 3:
        sums = 1 if keeps_gradients(layout) else times
        forward, backward, once = exposed(gather, hidden), exposed(gather, hidden_back), exposed(reduce, hidden_back)
        if sums == times:
            backward, once = exposed(gather + reduce, hidden_back), 0.0
        return ExchangeCost(forward, backward, once, sums * reduced + 2 * times * gathered)
    if layout.zero == 2 and not keeps_gradients(layout):
        sent = times * reduced + gathered
        return ExchangeCost(0.0, exposed(reduce, hidden_back), exposed(gather, hidden), sent)
    return ExchangeCost(once=exposed(reduce, hidden_back) + exposed(gather, hidden), bytes=reduced + gathered)


def tied_exchange(transformer: Transformer, cluster: Cluster, layout: Layout) -> ExchangeCost:
    """Return the exchange of a tied embedding's gradient between the first rank and the last."""
    if layout.pipeline == 1 or not transformer.tied:
        return ExchangeCost()
    size = layout.practice.gradient_bytes * transformer.vocabulary * transformer.hidden / layout.tensor
    return ExchangeCost(once=reduce_seconds(pipeline_link(cluster, layout), 2, size), bytes=size)


def pipeline_link(cluster: Cluster, layout: Layout) -> Link:
    """Return the slowest link between neighbours of a pipeline: the one between nodes, if there are several nodes."""
    return cluster.intra_node if layout.num_devices <= cluster.devices_per_node else cluster.inter_node


@dataclass(frozen=True, slots=True)
class Volumes:
    """Bytes that a device sends in a step, by purpose."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float


def message_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the bytes of one microbatch that a device sends to the next stage.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> message_bytes(gpt, Layout(batch=64, tensor=8, pipeline=8)) / 2**20
    6.0
    """
    part = layout.tensor if layout.practice.scatter_gather or layout.sequence_parallel else 1
    return WORD * tokens_of(transformer, layout) * transformer.hidden / part


def device_volumes(transformer: Transformer, layout: Layout, rank: Alike, data: float) -> Volumes:
    """Return the bytes that a device of a pipeline rank sends; `data` is the size of the gradient exchange.

    A layer's two blocks exchange in each pass: two passes, or three with full recomputation. With sequence parallelism,
    the stored inputs are also gathered.
    """
    times, ranks = layout.num_microbatches, layout.tensor
    exchange = 2 * WORD * tokens_of(transformer, layout) * transformer.hidden * (ranks - 1) / ranks
    forwards, ops = 1 + _again(layout, rank), recomputed_ops(layout)
    exchanges = 2 * (forwards + 1) + (1 if layout.sequence_parallel else 0)
    ring = ring_bytes(transformer, layout) * (layout.context - 1) / layout.context
    num_layers = sum(part * slice_.num_layers for slice_, part in rank.slices)
    num_expert_layers = sum(part * slice_.experts for slice_, part in rank.slices)
    sides = sum(part * (2 - slice_.is_first - slice_.is_last) for slice_, part in rank.slices)
    return Volumes(
        tensor=times * num_layers * exchanges * exchange,
        context=times * num_layers * (forwards + ("attention" in ops) + 2) * ring,
        expert=times * num_expert_layers * 2 * (forwards + ("experts" in ops) + 1) * routed_bytes(transformer, layout),
        pipeline=times * sides * message_bytes(transformer, layout) if layout.pipeline > 1 else 0.0,
        data=data,
    )


def _again(layout: Layout, rank: Alike) -> float:
    """Return the share of a rank's layers that are recomputed as a whole."""
    every = [slice_.num_layers for slice_, _ in rank.slices]
    return sum(whole_layers(layout.recompute, count) for count in every) / max(sum(every), 1)


@dataclass(frozen=True, slots=True)
class Load:
    """Ranks that are alike: their work for a microbatch, their waits for messages, and what they exchange.

    `parts` is the work of each of their stages, `cast` the number of weights that a step casts to 8 bits once.
    """

    alike: Alike
    ops: Ops
    parts: tuple[Ops, ...]
    waiting: float
    parameters: tuple[float, float]
    exchange: ExchangeCost
    cast: float = 0.0

    @property
    def pace(self) -> Pace:
        """Return the seconds of a microbatch, including everything that delays the rank."""
        return Pace(
            len(self.alike.ranks),
            self.ops.forward.total + self.waiting / 2 + self.exchange.forward,
            self.ops.again.total + self.ops.backward_input.total + self.waiting / 2,
            self.ops.backward_weight.total + self.exchange.backward,
        )


def loads_of(transformer: Transformer, cluster: Cluster, layout: Layout, waiting: float) -> list[Load]:
    """Return the ranks of a pipeline; `waiting` is the time a stage waits on each side with a neighbour."""
    counts = counts_of(transformer, layout)
    known: dict[StageLayers, Ops] = {}
    found = []
    for one in alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank):
        ops = Ops()
        for slice_, part in one.slices:
            if slice_ not in known:
                known[slice_] = slice_ops(transformer, cluster, layout, slice_)
            ops = ops + (known[slice_] if part == 1.0 else known[slice_].times(part))
        sides = sum(
            part * num_sides(layout.schedule, stage, layout.pipeline, layout.num_stages)
            for stage, part in stages_of(layout.schedule, one.first, layout.pipeline, layout.stages_per_rank)
        )
        parameters = device_parameters(transformer, layout, one)
        num_layers = sum(slice_.num_layers for slice_, _ in one.slices)
        exchange = data_exchange(cluster, layout, parameters, ops.forward.total, ops.backward.total, num_layers)
        parts = tuple(known[slice_] for slice_, _ in one.slices)
        cast = held_fp8(transformer, layout, one)
        found.append(Load(one, ops, parts, waiting * sides, parameters, exchange, cast))
    return found


def stage_ops(
    transformer: Transformer, cluster: Cluster, layout: Layout, loads: Sequence[Load] | None = None
) -> list[Ops]:
    """Return the seconds of a microbatch in every stage, including everything that delays its rank."""
    _, waiting = hop_seconds(transformer, cluster, layout)
    slices = slices_of(transformer, counts_of(transformer, layout))
    known = {slice_: slice_ops(transformer, cluster, layout, slice_) for slice_ in set(slices)}
    if loads is None:
        loads = loads_of(transformer, cluster, layout, waiting)
    exchanges = {rank: load.exchange for load in loads for rank in load.alike.ranks}
    found = [Ops()] * len(slices)
    for rank, exchange in exchanges.items():
        forward, backward = (one / layout.stages_per_rank for one in (exchange.forward, exchange.backward))
        for stage, _ in stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank):
            wait = waiting * num_sides(layout.schedule, stage, layout.pipeline, layout.num_stages) / 2
            found[stage] = known[slices[stage]] + Ops(Spent(wait + forward), Spent(), Spent(wait), Spent(backward))
    return found


def slice_ops(transformer: Transformer, cluster: Cluster, layout: Layout, slice_: StageLayers) -> Ops:
    """Return the seconds of a microbatch in a stage."""
    return _slice(transformer, cluster, relevant(layout), slice_)


@lru_cache(maxsize=4096)
def _slice(transformer: Transformer, cluster: Cluster, layout: Layout, slice_: StageLayers) -> Ops:
    ops = Ops()
    for count, experts, how in slice_.parts(layout.recompute):
        ops = ops + layer_ops(transformer, cluster, layout, experts=experts, recompute=how).times(count)
    if slice_.is_first:
        ops = ops + embedding_ops(transformer, cluster, layout)
    if slice_.is_last:
        ops = ops + head_ops(transformer, cluster, layout)
    return ops


def hop_seconds(transformer: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return how late a message between stages arrives, and how long a stage waits for it on each side."""
    if layout.pipeline == 1:
        return 0.0, 0.0
    seconds = pipeline_link(cluster, layout).seconds(message_bytes(transformer, layout))
    if layout.practice.scatter_gather and not layout.sequence_parallel:
        whole = WORD * tokens_of(transformer, layout) * transformer.hidden
        seconds += gather_seconds(cluster.link(layout.tensor, 1), layout.tensor, whole)
    if layout.practice.overlap_pipeline:
        return seconds, 0.0
    return 0.0, seconds if layout.practice.duplex else 2 * seconds
