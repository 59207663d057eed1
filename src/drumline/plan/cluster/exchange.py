"""What data-parallel ranks exchange in a step, and what of it computing does not hide."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.cluster.hardware import Cluster, Link
from drumline.plan.cluster.kernels import gather_seconds
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.memory import GRADIENT_BYTES, WEIGHT_BYTES
from drumline.plan.cluster.transformer import Transformer


@dataclass(frozen=True, slots=True)
class Exchange:
    """Seconds that are exposed, and bytes that a device sends."""

    seconds: float
    bytes: float


def data_exchange(
    cluster: Cluster, layout: Layout, parameters: tuple[float, float], forward_seconds: float, backward_seconds: float
) -> Exchange:
    """Return the exchange of a rank's gradients and weights; the seconds are those of one microbatch.

    Gradients are summed in 32 bits, by a reduce-scatter. What comes back are all gradients (ZeRO 0) or the new weights in
    16 bits. ZeRO 2 keeps no whole gradients and sums them after every microbatch; ZeRO 3 keeps no whole weights either, and
    gathers them before every forward and every backward.
    """
    reduce, gather, reduced, gathered = 0.0, 0.0, 0.0, 0.0
    back = GRADIENT_BYTES if layout.zero == 0 else WEIGHT_BYTES
    group = layout.data * layout.context
    for count, size, stride in (
        (parameters[0], group, layout.tensor),
        (parameters[1], group // layout.expert, layout.tensor * layout.expert),
    ):
        if size > 1 and count:
            link = cluster.link(size, stride)
            reduce += gather_seconds(link, size, GRADIENT_BYTES * count)
            gather += gather_seconds(link, size, back * count)
            reduced += GRADIENT_BYTES * count * (size - 1) / size
            gathered += back * count * (size - 1) / size
    times = layout.num_microbatches
    num_reduces = times if layout.zero >= 2 else 1
    num_gathers = 2 * times if layout.zero >= 3 else 1
    sent = num_reduces * reduced + num_gathers * gathered
    if not layout.practice.overlap_data:
        return Exchange(num_reduces * reduce + num_gathers * gather, sent)
    if layout.zero >= 3:
        exposed = max(gather - forward_seconds, 0.0) + max(gather + reduce - backward_seconds, 0.0)
        return Exchange(times * exposed + gather, sent)  # the first layers' weights come before anything can hide them
    if layout.zero >= 1:
        exposed = num_reduces * max(reduce - backward_seconds, 0.0) + max(gather - forward_seconds, 0.0)
        return Exchange(exposed, sent)
    return Exchange(max(reduce + gather - backward_seconds, 0.0), sent)


def tied_exchange(transformer: Transformer, cluster: Cluster, layout: Layout) -> Exchange:
    """Return the exchange of a tied embedding's gradient between the first rank and the last."""
    if layout.pipeline == 1 or not transformer.tied:
        return Exchange(0.0, 0.0)
    size = GRADIENT_BYTES * transformer.vocabulary * transformer.hidden / layout.tensor
    return Exchange(2 * gather_seconds(pipeline_link(cluster, layout), 2, size), size)


def pipeline_link(cluster: Cluster, layout: Layout) -> Link:
    """Return the link between neighbours of a pipeline: the slowest one, which is that between nodes if there are any."""
    return cluster.intra_node if layout.num_devices <= cluster.devices_per_node else cluster.inter_node
