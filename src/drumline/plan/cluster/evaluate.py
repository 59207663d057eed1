"""What a layout of a transformer on a cluster takes: `estimate`."""

from __future__ import annotations

from drumline.plan.cluster.check import check
from drumline.plan.cluster.estimate import Bytes, Estimate, Seconds
from drumline.plan.cluster.exchange import data_exchange, pipeline_link, tied_exchange
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import gather_seconds, memory_seconds
from drumline.plan.cluster.layers import WORD, embedding_ops, head_ops, layer_ops, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.memory import device_bytes
from drumline.plan.cluster.shape import makespan, simulated, stages_of
from drumline.plan.cluster.slices import Slices, slices_of
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.cluster.volumes import message_bytes, volumes_of
from drumline.plan.cluster.work import Ops, Work

STEP_BYTES = 42  # per parameter: the norm, the scale, Adam in 32 bits, and the new weight


def estimate(transformer: Transformer, cluster: Cluster, layout: Layout, *, exact: bool = False) -> Estimate:
    """Return what the layout takes; `exact` simulates the schedule where otherwise a formula does.

    >>> from drumline.plan.cluster.machines import cluster
    >>> from drumline.plan.cluster.models import model
    >>> layout = Layout(batch=1536, tensor=8, pipeline=8, data=24, recompute="selective", sequence_parallel=True)
    >>> found = estimate(model("gpt-175b"), cluster("a100-80", 1536), layout)
    >>> found.bytes.total < 80 * 2**30
    True
    """
    check(transformer, cluster, layout)
    slices = slices_of(transformer, layout)
    stages = stage_ops(transformer, cluster, layout, slices)
    hop, blocked = hop_seconds(transformer, cluster, layout)
    times = layout.num_microbatches
    ranks = [_of_rank(layout, stages, rank) for rank in range(layout.pipeline)]
    busiest = max(ranks, key=lambda one: one.total.total)
    # A rank that waits for its messages is as good as one that computes meanwhile.
    waits = [one + Ops(Work(blocked / 2), Work(), Work(blocked / 2)) for one in stages] if blocked else stages
    timed = simulated if exact else makespan
    taken = timed(layout.schedule, waits, layout.pipeline, times, hop_seconds=hop)
    work = busiest.total
    again = busiest.again.total
    steady = times * (work.total + blocked * layout.stages_per_rank)
    exchanged = [
        data_exchange(cluster, layout, slices.parameters(rank), ops.forward.total, ops.backward.total)
        for rank, ops in enumerate(ranks)
    ]
    exchange = max(exchanged, key=lambda one: one.seconds)
    tied = tied_exchange(transformer, cluster, layout)
    seconds = Seconds(
        compute=times * (work.compute - busiest.again.compute),
        recompute=times * again,
        tensor=times * (work.tensor - busiest.again.tensor),
        context=times * (work.context - busiest.again.context),
        expert=times * (work.expert - busiest.again.expert),
        pipeline=times * blocked * layout.stages_per_rank,
        data_exposed=exchange.seconds + tied.seconds,
        bubble=max(taken - steady, 0.0),
        optimizer=max(_step(cluster, layout, slices, rank) for rank in range(layout.pipeline)),
    )
    mean = sum(one.total.total for one in ranks) / len(ranks)
    fullest = max((device_bytes(transformer, layout, slices, rank) for rank in range(layout.pipeline)), key=_total)
    num_layers = max(a + b for a, b in zip(slices.dense_layers, slices.expert_layers, strict=True))
    volumes = volumes_of(
        transformer,
        layout,
        num_layers * layout.stages_per_rank,
        max(slices.expert_layers) * layout.stages_per_rank,
        max(one.bytes for one in exchanged) + tied.bytes,
    )
    flops = model_flops(transformer, layout.batch) / layout.num_devices
    return Estimate(seconds, fullest, volumes, flops, 1.0 - times * mean / max(taken, times * mean))


def stage_ops(transformer: Transformer, cluster: Cluster, layout: Layout, slices: Slices) -> list[Ops]:
    """Return what a microbatch takes in every stage."""
    plain = layer_ops(transformer, cluster, layout)
    expert = layer_ops(transformer, cluster, layout, experts=True) if slices.has_experts else Ops()
    known: dict[tuple[int, int], Ops] = {}
    stages = []
    for kind in zip(slices.dense_layers, slices.expert_layers, strict=True):
        if kind not in known:
            known[kind] = plain.times(kind[0]) + expert.times(kind[1])
        stages.append(known[kind])
    stages[0] = stages[0] + embedding_ops(transformer, cluster, layout)
    stages[-1] = stages[-1] + head_ops(transformer, cluster, layout)
    return stages


def hop_seconds(transformer: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return how late a message between stages comes, and how long a stage's microbatch keeps its rank from computing."""
    if layout.pipeline == 1:
        return 0.0, 0.0
    seconds = pipeline_link(cluster, layout).seconds(message_bytes(transformer, layout))
    if layout.practice.scatter_gather and not layout.sequence_parallel:
        whole = WORD * tokens_of(transformer, layout) * transformer.hidden
        seconds += gather_seconds(cluster.link(layout.tensor, 1), layout.tensor, whole)
    if layout.practice.overlap_pipeline:
        return seconds, 0.0
    return 0.0, (2 if layout.practice.duplex else 4) * seconds


def model_flops(transformer: Transformer, batch: int) -> float:
    """Return the operations of a step: two for each weight and token forward, twice as many backward, and attention.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> h, l, s, v = 12288, 96, 2048, 51200
    >>> round(model_flops(gpt, 1) / (72 * s * l * h**2 * (1 + s / 6 / h + v / 12 / l / h)), 6)
    1.0
    """
    width = transformer.num_heads * transformer.head_width
    keys = 2 * transformer.num_key_value_heads * transformer.head_width
    kinds = 3 if transformer.gated else 2
    inner = float(transformer.num_dense_layers * transformer.feedforward)
    if (experts := transformer.experts) is not None:
        each = (experts.per_token + experts.num_shared) * experts.feedforward
        inner += (transformer.num_layers - transformer.num_dense_layers) * each
    attention = transformer.num_layers * (transformer.hidden * (2 * width + keys) + 2 * transformer.sequence * width)
    weights = attention + kinds * transformer.hidden * inner + transformer.hidden * transformer.vocabulary
    return 6.0 * batch * transformer.sequence * weights


def _of_rank(layout: Layout, stages: list[Ops], rank: int) -> Ops:
    found = Ops()
    for stage, part in stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank):
        found = found + stages[stage].times(part)
    return found


def _step(cluster: Cluster, layout: Layout, slices: Slices, rank: int) -> float:
    dense, experts = slices.parameters(rank)
    if layout.zero >= 1:
        group = layout.data * layout.context
        dense, experts = dense / group, experts / (group // layout.expert)
    return memory_seconds(cluster.device, STEP_BYTES * (dense + experts))


def _total(size: Bytes) -> float:
    return size.total
