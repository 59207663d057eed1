"""What a layout of a transformer on a cluster takes: `estimate`.

Every rank does a microbatch's work of its stages at its own pace. The schedule makes a step of it: all microbatches at
the pace of the busiest rank, and a bubble around them, by formula or by the simulator. After that gradients are
exchanged, as far as this was not hidden, and the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.plan.cluster.check import check
from drumline.plan.cluster.estimate import Bytes, Estimate, Seconds
from drumline.plan.cluster.exchange import Exchange, data_exchange, pipeline_link, tied_exchange
from drumline.plan.cluster.flops import model_flops
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import gather_seconds, memory_seconds
from drumline.plan.cluster.layers import WORD, embedding_ops, head_ops, layer_ops, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.memory import device_bytes, device_parameters, sharded
from drumline.plan.cluster.shape import FORMULAS, Pace, makespan, num_sides, simulated, simulated_few, stages_of
from drumline.plan.cluster.slices import Alike, Slice, alike, counts_of, slices_of
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.cluster.volumes import device_volumes, message_bytes
from drumline.plan.cluster.work import Ops, Work

STEP_BYTES = 42  # per parameter: the norm, the scale, Adam in 32 bits, and the new weight


def estimate(transformer: Transformer, cluster: Cluster, layout: Layout, *, exact: bool = False) -> Estimate:
    """Return what the layout takes; `exact` simulates every microbatch where otherwise a formula does.

    >>> from drumline.plan.cluster.machines import cluster
    >>> from drumline.plan.cluster.models import model
    >>> layout = Layout(batch=1536, tensor=8, pipeline=8, data=24, recompute="selective", sequence_parallel=True)
    >>> found = estimate(model("gpt-175b"), cluster("a100-80", 1536), layout)
    >>> found.bytes.total < 80 * 2**30
    True
    """
    check(transformer, cluster, layout)
    times = layout.num_microbatches
    counts = counts_of(transformer, layout)
    kinds = alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    hop, waiting = hop_seconds(transformer, cluster, layout)
    ranks = _ranks(transformer, cluster, layout, kinds)
    sides = [_sides(layout, one.first) for one in kinds]
    parameters = [device_parameters(transformer, layout, one) for one in kinds]
    exchanges = [
        data_exchange(cluster, layout, held, ops.forward.total, ops.backward.total)
        for held, ops in zip(parameters, ranks, strict=True)
    ]
    paces = [
        Pace(
            len(one.ranks),
            ops.forward.total + waiting * side / 2 + exchange.forward,
            ops.again.total + ops.backward_input.total + waiting * side / 2,
            ops.backward_weight.total + exchange.backward,
        )
        for one, ops, side, exchange in zip(kinds, ranks, sides, exchanges, strict=True)
    ]
    busiest = max(range(len(paces)), key=lambda at: paces[at].total)
    if exact or layout.schedule not in FORMULAS:
        exposed = {rank: exchange for one, exchange in zip(kinds, exchanges, strict=True) for rank in one.ranks}
        stages = _stages(transformer, cluster, layout, waiting, exposed)
        run = simulated if exact else simulated_few
        taken = run(layout.schedule, stages, layout.pipeline, times, hop_seconds=hop)
    else:
        taken = makespan(layout.schedule, paces, times, layout.stages_per_rank, hop)
    work, again = ranks[busiest].total, ranks[busiest].again
    tied = tied_exchange(transformer, cluster, layout)
    once = max(one.once for one in exchanges) + tied.once
    stepped = max(sharded(layout, held) if layout.zero else sum(held) for held in parameters)
    seconds = Seconds(
        compute=times * (work.compute - again.compute),
        recompute=times * again.total,
        tensor=times * (work.tensor - again.tensor),
        context=times * (work.context - again.context),
        expert=times * (work.expert - again.expert),
        pipeline=times * waiting * sides[busiest],
        data_exposed=times * (exchanges[busiest].forward + exchanges[busiest].backward) + once,
        bubble=max(taken - times * paces[busiest].total, 0.0),
        optimizer=memory_seconds(cluster.device, STEP_BYTES * stepped),
    )
    mean = sum(pace.count * pace.total for pace in paces) / layout.pipeline
    return Estimate(
        seconds,
        max((device_bytes(transformer, layout, one) for one in kinds), key=_total),
        device_volumes(transformer, layout, kinds[busiest], max(one.bytes for one in exchanges) + tied.bytes),
        model_flops(transformer, layout.batch) / layout.num_devices,
        1.0 - times * mean / max(taken, times * mean),
    )


def stage_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> list[Ops]:
    """Return what a microbatch takes in every stage, with what its rank waits for: what `exact` simulates."""
    counts = counts_of(transformer, layout)
    kinds = alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    exposed = {}
    for one, ops in zip(kinds, _ranks(transformer, cluster, layout, kinds), strict=True):
        held = device_parameters(transformer, layout, one)
        exchange = data_exchange(cluster, layout, held, ops.forward.total, ops.backward.total)
        exposed.update(dict.fromkeys(one.ranks, exchange))
    return _stages(transformer, cluster, layout, hop_seconds(transformer, cluster, layout)[1], exposed)


def hop_seconds(transformer: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return how late a message between stages comes, and how long a rank waits on each side for a microbatch's."""
    if layout.pipeline == 1:
        return 0.0, 0.0
    seconds = pipeline_link(cluster, layout).seconds(message_bytes(transformer, layout))
    if layout.practice.scatter_gather and not layout.sequence_parallel:
        whole = WORD * tokens_of(transformer, layout) * transformer.hidden
        seconds += gather_seconds(cluster.link(layout.tensor, 1), layout.tensor, whole)
    if layout.practice.overlap_pipeline:
        return seconds, 0.0
    return 0.0, seconds if layout.practice.duplex else 2 * seconds


def _ranks(transformer: Transformer, cluster: Cluster, layout: Layout, kinds: Sequence[Alike]) -> list[Ops]:
    """Return what a microbatch takes on ranks of each kind."""
    known: dict[Slice, Ops] = {}
    ranks = []
    for one in kinds:
        ops = Ops()
        for slice_, part in one.slices:
            if slice_ not in known:
                known[slice_] = _stage(transformer, cluster, layout, slice_)
            ops = ops + (known[slice_] if part == 1.0 else known[slice_].times(part))
        ranks.append(ops)
    return ranks


def _stage(transformer: Transformer, cluster: Cluster, layout: Layout, slice_: Slice) -> Ops:
    """Return what a microbatch takes in a stage."""
    ops = layer_ops(transformer, cluster, layout).times(slice_.dense) if slice_.dense else Ops()
    if slice_.experts:
        ops = ops + layer_ops(transformer, cluster, layout, experts=True).times(slice_.experts)
    if slice_.is_first:
        ops = ops + embedding_ops(transformer, cluster, layout)
    if slice_.is_last:
        ops = ops + head_ops(transformer, cluster, layout)
    return ops


def _stages(
    transformer: Transformer, cluster: Cluster, layout: Layout, waiting: float, exposed: dict[int, Exchange]
) -> list[Ops]:
    """Return what a microbatch takes in every stage, with what its rank waits for, for the simulator."""
    slices = slices_of(transformer, counts_of(transformer, layout))
    known = {slice_: _stage(transformer, cluster, layout, slice_) for slice_ in set(slices)}
    found = [Ops()] * len(slices)
    for rank, exchange in exposed.items():
        forward, backward = (one / layout.stages_per_rank for one in (exchange.forward, exchange.backward))
        for stage, _ in stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank):
            wait = waiting * num_sides(layout.schedule, stage, layout.pipeline, layout.num_stages) / 2
            found[stage] = known[slices[stage]] + Ops(Work(wait + forward), Work(), Work(wait), Work(backward))
    return found


def _sides(layout: Layout, rank: int) -> float:
    """Return on how many sides a rank's stages have neighbours elsewhere, on average over its microbatches."""
    return sum(
        part * num_sides(layout.schedule, stage, layout.pipeline, layout.num_stages)
        for stage, part in stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank)
    )


def _total(size: Bytes) -> float:
    return size.total
