"""What devices send each other in a step: bytes by what they are for, and seconds that computing does not hide."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drumline.plan.cluster.hardware import Cluster, Link
from drumline.plan.cluster.kernels import gather_seconds, reduce_seconds
from drumline.plan.cluster.layers import WORD, ring_bytes, routed_bytes, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.memory import WEIGHT_BYTES
from drumline.plan.cluster.slices import Alike
from drumline.plan.cluster.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds that are exposed in every forward, in every backward, and once a step; and bytes that a device sends."""

    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0
    bytes: float = 0.0

    def seconds(self, num_microbatches: int) -> float:
        """Return all exposed seconds of a step."""
        return num_microbatches * (self.forward + self.backward) + self.once


def data_exchange(
    cluster: Cluster,
    layout: Layout,
    parameters: tuple[float, float],
    forward_seconds: float,
    backward_seconds: float,
    num_layers: int = 1,
) -> Exchange:
    """Return the exchange of a rank's gradients and weights; the seconds are those of one microbatch on the rank.

    Gradients are summed by a reduce-scatter. What comes back are all sums (ZeRO 0) or the new weights in 16 bits.
    ZeRO 2 keeps no whole gradients and sums them after every microbatch; ZeRO 3 keeps no whole weights either, and
    gathers them before every forward and every backward, layer by layer, so that every layer pays for the latency.
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
                link = replace(link, latency_seconds=num_layers * link.latency_seconds)
            reduce += gather_seconds(link, size, there * count)
            gather += gather_seconds(link, size, back * count)
            reduced += there * count * (size - 1) / size
            gathered += back * count * (size - 1) / size
    times = layout.num_microbatches
    hidden, hidden_back = (forward_seconds, backward_seconds) if layout.practice.overlap_data else (0.0, 0.0)
    if layout.zero == 3:
        sent = times * (reduced + 2 * gathered)
        return Exchange(max(gather - hidden, 0.0), max(gather + reduce - hidden_back, 0.0), 0.0, sent)
    if layout.zero == 2:
        sent = times * reduced + gathered
        return Exchange(0.0, max(reduce - hidden_back, 0.0), max(gather - hidden, 0.0), sent)
    if layout.zero == 1:
        return Exchange(0.0, 0.0, max(reduce - hidden_back, 0.0) + max(gather - hidden, 0.0), reduced + gathered)
    return Exchange(0.0, 0.0, max(reduce + gather - hidden_back, 0.0), reduced + gathered)


def tied_exchange(transformer: Transformer, cluster: Cluster, layout: Layout) -> Exchange:
    """Return the exchange of a tied embedding's gradient between the first rank and the last."""
    if layout.pipeline == 1 or not transformer.tied:
        return Exchange()
    size = layout.practice.gradient_bytes * transformer.vocabulary * transformer.hidden / layout.tensor
    return Exchange(once=reduce_seconds(pipeline_link(cluster, layout), 2, size), bytes=size)


def pipeline_link(cluster: Cluster, layout: Layout) -> Link:
    """Return the slowest link between neighbours of a pipeline: that between nodes, where there are several."""
    return cluster.intra_node if layout.num_devices <= cluster.devices_per_node else cluster.inter_node


@dataclass(frozen=True, slots=True)
class Volumes:
    """Bytes that a device sends in a step, by what they are for."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float


def message_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return what a device sends of one microbatch to the next stage.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> message_bytes(gpt, Layout(batch=64, tensor=8, pipeline=8)) / 2**20
    6.0
    """
    part = layout.tensor if layout.practice.scatter_gather or layout.sequence_parallel else 1
    return WORD * tokens_of(transformer, layout) * transformer.hidden / part


def device_volumes(transformer: Transformer, layout: Layout, rank: Alike, data: float) -> Volumes:
    """Return what a device of a pipeline rank sends; `data` is what the exchange of gradients takes.

    A layer's two blocks exchange in each pass: two of them, three with full recomputation. With sequence parallelism
    also the stored inputs are gathered.
    """
    times, ranks = layout.num_microbatches, layout.tensor
    exchange = 2 * WORD * tokens_of(transformer, layout) * transformer.hidden * (ranks - 1) / ranks
    forwards = 2 if layout.recompute == "full" else 1
    exchanges = 2 * (forwards + 1) + (1 if layout.sequence_parallel else 0)
    ring = ring_bytes(transformer, layout) * (layout.context - 1) / layout.context
    num_layers = sum(part * slice_.num_layers for slice_, part in rank.slices)
    num_expert_layers = sum(part * slice_.experts for slice_, part in rank.slices)
    sides = sum(part * (2 - slice_.is_first - slice_.is_last) for slice_, part in rank.slices)
    return Volumes(
        tensor=times * num_layers * exchanges * exchange,
        context=times * num_layers * (forwards + 2) * ring,
        expert=times * num_expert_layers * 2 * (forwards + 1) * routed_bytes(transformer, layout),
        pipeline=times * sides * message_bytes(transformer, layout) if layout.pipeline > 1 else 0.0,
        data=data,
    )
