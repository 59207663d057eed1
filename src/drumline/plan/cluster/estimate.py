"""Estimate a transformer layout on a cluster: seconds of a step, bytes of a device, and the operations that it runs.

Every rank processes a microbatch through its stages at its own pace. The schedule turns this into a step: all
microbatches at the pace of the busiest rank, plus a bubble, by formula or by the simulator. Then ranks exchange the
gradients that were not exchanged earlier, and the optimizer steps.

What the model needs is in `transformer` (`model_flops`): MFU counts that. HFU counts all that devices run: also what is
recomputed, and the scores that fused attention computes again in its backward. Without fused attention they also
compute what is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, NamedTuple

from drumline.plan.cluster.device_memory import Bytes, fullest_bytes, sharded
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import CAST_TWICE, memory_seconds, product_seconds, slice_ops
from drumline.plan.cluster.layers import Operation, layers_of, product_weights, tokens_of
from drumline.plan.cluster.layout import WHOLE, Layout, check
from drumline.plan.cluster.loads import (
    Load,
    PipelineWork,
    Volumes,
    device_volumes,
    hop_seconds,
    loads_of,
    pipeline_seconds,
    tied_exchange,
    work_of,
)
from drumline.plan.cluster.practice import OPTIMIZERS
from drumline.plan.cluster.stages import alike, counts_of, slices_of
from drumline.plan.cluster.transformer import Transformer, model_flops
from drumline.schedules import DEFAULT, find


@dataclass(frozen=True, slots=True)
class Seconds:
    """A step's seconds on the busiest rank, each second in one item; `exposed` is what compute does not hide.

    `bubble` is how long this rank waits; the bubble of all ranks is that of `Estimate`.
    """

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data_exposed: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        computing = self.compute + self.recompute + self.bubble + self.optimizer
        return computing + self.tensor + self.context + self.expert + self.pipeline + self.data_exposed


@dataclass(frozen=True, slots=True)
class Estimate:
    """What is known about a layout before it runs.

    `flops_per_device` are the operations that the model needs, without recomputation and without what attention masks.
    `bubble` is the idle share of all ranks while the pipeline runs.
    """

    seconds: Seconds
    bytes: Bytes
    volumes: Volumes
    flops_per_device: float
    bubble: float

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, including sums.

        >>> zeros = Estimate(Seconds(*[1.0] * 9), Bytes(*[2.0] * 5), Volumes(*[0.0] * 5), 18.0, 0.1)
        >>> zeros.to_json()["seconds"]["total"], zeros.to_json()["flops_per_second"]
        (9.0, 2.0)
        """
        return {
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "bytes": {**asdict(self.bytes), "total": self.bytes.total},
            "volumes": asdict(self.volumes),
            "bubble": self.bubble,
            "flops_per_device": self.flops_per_device,
            "flops_per_second": self.flops_per_second,
        }

    @property
    def flops_per_second(self) -> float:
        """Return the rate at which a device runs the operations that the model needs."""
        return self.flops_per_device / self.seconds.total


_TOTAL: Callable[[Load], float] = attrgetter("total")
LAST = "feed-forward"  # the operation with a dense layer's last product
STEP_BYTES = OPTIMIZERS["adamw"].step_bytes  # per parameter: the norm, the scale, Adam in 32 bits, and the new weight


def estimate(
    transformer: Transformer, cluster: Cluster, layout: Layout, *, exact: bool = False, rough: bool = False
) -> Estimate:
    """Estimate the layout; `exact` simulates every microbatch instead of using a formula, `rough` simulates none.

    Without either, formulas serve where they are within 2% of the simulator.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> from drumline.plan.cluster.models import model
    >>> layout = Layout(batch=1536, tensor=8, pipeline=8, data=24, recompute="selective", sequence_parallel=True)
    >>> found_estimate = estimate(model("gpt-175b"), cluster("a100-80", 1536), layout)
    >>> found_estimate.bytes.total < 80 * 2**30
    True
    """
    check(transformer, cluster, layout)
    loads = loads_of(transformer, cluster, layout)
    tied = tied_exchange(transformer, cluster, layout)
    paces = [load.pace for load in loads]
    busy = layout.num_microbatches * sum(memory.count * memory.total for memory in paces) / layout.pipeline
    busiest = max(loads, key=_TOTAL)
    sent = max(load.exchange.bytes for load in loads) + tied.bytes
    volumes = device_volumes(transformer, layout, busiest.alike, sent)
    taken = pipeline_seconds(transformer, cluster, layout, loads, exact=exact, rough=rough)
    return Estimate(
        _seconds(transformer, cluster, layout, loads, taken, tied.once),
        fullest_bytes(transformer, layout),
        volumes,
        model_flops(transformer, layout.batch, causal=True) / layout.num_devices,
        1.0 - busy / max(taken, busy),
    )


class Least(NamedTuple):
    """The least seconds of a step, and of its work if all ranks had equally much.

    `working` contains all backwards of a rank: with more to do in every backward of every rank, it grows by as much.
    `alone` leaves out the exchange at the end of a step.
    """

    total: float
    even: float
    working: float
    alone: float


def least_seconds(transformer: Transformer, cluster: Cluster, layout: Layout) -> Least:
    """Return what a step takes at least, in whatever order its schedule runs it; nothing is simulated or weighed.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> from drumline.plan.cluster.models import model
    >>> gpt, machines = model("gpt-7.5b"), cluster("a100-80", 8)
    >>> layout = Layout(batch=16, pipeline=8)
    >>> bound, found_estimate = least_seconds(gpt, machines, layout), estimate(gpt, machines, layout, exact=True)
    >>> bound.even < found_estimate.seconds.compute, 0.95 < bound.total / found_estimate.seconds.total < 1 + 1e-9
    (True, True)
    """
    cost = work_of(transformer, cluster, layout)
    loads = loads_of(transformer, cluster, layout, cost)
    hop, _ = hop_seconds(transformer, cluster, layout)
    times, tied = layout.num_microbatches, tied_exchange(transformer, cluster, layout)
    working, ahead = _least_taken(layout, cost, loads, hop)
    working = max(working, times * max(map(_TOTAL, loads)))
    once = max(load.exchange.once for load in loads) + tied.once
    update = _update_seconds(transformer, cluster, layout, loads)
    work = sum(len(rank.alike.ranks) * rank.total for rank in cost.ranks)
    alone = max(working, ahead) + update
    return Least(alone + once, times * work / layout.pipeline, working + update + once, alone)


def recomputed_seconds(transformer: Transformer, cluster: Cluster, layout: Layout) -> float:
    """Return what the recomputation of a layout adds at least to `Least.working` of the same without.

    The exchange of gradients hides behind one backward, which gets longer. Nothing is said where every backward hides
    one, as with ZeRO 3.

    >>> from dataclasses import replace
    >>> from drumline.plan.cluster.hardware import cluster
    >>> from drumline.plan.cluster.models import model
    >>> gpt, machines, plain = model("gpt-7.5b"), cluster("a100-80", 8), Layout(batch=16, pipeline=8)
    >>> full = replace(plain, recompute="full")
    >>> before, after = (least_seconds(gpt, machines, layout).total for layout in (plain, full))
    >>> 0 < recomputed_seconds(gpt, machines, full) <= after - before
    True
    """
    if layout.zero >= 2:
        return 0.0
    place = counts_of(transformer, layout), layout.schedule, layout.pipeline, layout.stages_per_rank
    kinds = [kind.slices for kind in alike(transformer, *place)]
    again = {
        slice_: slice_ops(transformer, cluster.nodes, layout.share, slice_).again.total
        for slice_ in {slice_ for slices in kinds for slice_, _ in slices}
    }
    least = min(sum(part * again[slice_] for slice_, part in slices) for slices in kinds)
    return (layout.num_microbatches - 1) * least


def _least_taken(layout: Layout, work: PipelineWork, loads: Sequence[Load], hop: float) -> tuple[float, float]:
    """Return the least seconds of a pipeline: no rank takes less than three sums. The third is returned apart.

    - A microbatch comes down to its first stage, then it does all its work.
    - A microbatch passes all stages and comes back to its last one, then it does all its backwards.
    - A microbatch comes down to its first stage, then it does all its forwards, and the last of them continues to the
      last stage and back to the first.

    If backwards are whole, the first two end with the way up from its first stage; if they are split, it may compute
    weight gradients meanwhile.
    """
    times = layout.num_microbatches
    if find(layout.schedule).two_directions:
        return max(times * load.total for load in loads), 0.0
    working = least_ahead = 0.0
    for load, (beside_all, beside_back, beside_ahead) in zip(loads, work.beside(hop), strict=True):
        own_after = times * load.total + beside_all
        back = times * (load.backward_input + load.backward_weight) + beside_back
        ahead = times * load.forward + beside_ahead
        working, least_ahead = max(working, own_after, back), max(least_ahead, ahead)
    return working, least_ahead


def _seconds(
    transformer: Transformer, cluster: Cluster, layout: Layout, loads: Sequence[Load], taken: float, tied: float
) -> Seconds:
    """Return the items of a step whose pipeline takes so long; `tied` is the exchange of a tied embedding."""
    times, busiest = layout.num_microbatches, max(loads, key=_TOTAL)
    ops, exchange = busiest.ops, busiest.exchange
    work = ops.forward + ops.backward_input + ops.backward_weight
    once = max(load.exchange.once for load in loads) + tied
    return Seconds(
        compute=times * work.compute,
        recompute=times * ops.again.total,
        tensor=times * work.tensor,
        context=times * work.context,
        expert=times * work.expert,
        pipeline=times * busiest.waiting,
        data_exposed=times * (exchange.forward + exchange.backward) + once,
        bubble=_beyond(taken, times * busiest.total),
        optimizer=_update_seconds(transformer, cluster, layout, loads),
    )


def _update_seconds(transformer: Transformer, cluster: Cluster, layout: Layout, loads: Sequence[Load]) -> float:
    """Return the seconds of the optimizer's step."""
    stepped = max(sharded(layout, load.work.parameters) if layout.zero else sum(load.work.parameters) for load in loads)
    cast = max(load.work.cast for load in loads)
    states = layout.practice.states
    orthogonal = orthogonal_seconds(transformer, cluster, layout, loads) if states.muon else 0.0
    updated = memory_seconds(cluster.device, states.step_bytes * stepped + CAST_TWICE * cast)
    return updated + orthogonal + layout.practice.step_seconds


def orthogonal_seconds(transformer: Transformer, cluster: Cluster, layout: Layout, loads: Sequence[Load]) -> float:
    """Return the seconds in which Muon makes a device's updates orthogonal: five steps of three products.

    For a weight of m x n with m <= n these are X X', its square, and their product with X. With ZeRO, ranks take turns.
    """
    layers, group = layers_of(transformer, layout.share), layout.data * layout.context if layout.zero else 1
    every = []
    for layer in layers:
        seconds = 0.0
        for routed in (False, True):
            turns = max(group // layout.expert, 1) if routed else group
            for inputs, outputs, times in product_weights(layer, experts=routed):
                m, n = sorted((inputs, outputs))
                sizes = ((m, m, n), (m, m, m), (m, n, m))
                seconds += 5 * sum(product_seconds(cluster.device, *size, times) for size in sizes) / turns
        every.append(seconds)
    return max(sum(s.dense * every[0] + s.experts * every[1] for s, _ in load.alike.slices) for load in loads)


def _beyond(taken: float, work: float) -> float:
    """Return the seconds that a pipeline takes beyond its work; what is left of rounding is none.

    >>> _beyond(2.5, 2.0), _beyond(1.0 + 1e-15, 1.0)
    (0.5, 0.0)
    """
    return taken - work if taken > work * (1 + 1e-12) else 0.0


def device_flops(transformer: Transformer, layout: Layout) -> float:
    """Return the operations of a step on a device, in the mean of all.

    >>> from drumline.plan.cluster.models import MODELS
    >>> from drumline.plan.cluster.transformer import model_flops
    >>> gpt, layouts = MODELS["gpt-1.7b"], [Layout(batch=8, data=8, recompute=how) for how in ("none", "full")]
    >>> needed = model_flops(gpt, 8, causal=True) / 8
    >>> [round(device_flops(gpt, layout) / needed, 2) for layout in layouts]
    [1.01, 1.32]
    """
    # The order of a schedule changes no operation.
    layers, total = layers_of(transformer, replace(layout, schedule=DEFAULT).share), 0.0
    base = transformer.frozen_base
    # Gradients of weights: of all, or of adapters, which run in every pass.
    again, by_weight = (0.0, 1.0) if base is None else (2 * base.trainable_share, base.trainable_share)
    for slice_ in slices_of(transformer, counts_of(transformer, layout)):
        for count, experts, recomputed in slice_.parts(layout):
            every = (_flops(op, recomputed, again + by_weight) for op in layers[experts].operations)
            total += count * sum(every)
            if recomputed == WHOLE and layout.practice.stops_early and layers[experts].operations[-2].name == LAST:
                last = layers[experts].operations[-2].products[-1]
                total -= count * 2.0 * last.rows * last.columns * last.depth
    head = 2.0 * tokens_of(transformer, layout) * transformer.hidden * transformer.vocabulary / layout.tensor
    total += (2.0 if base is not None else 3.0) * head
    return total * layout.num_microbatches / layout.pipeline


def _flops(op: Operation, recomputed: Sequence[str], more: float) -> float:
    """Return an operation's own, in all passes: forward, by inputs, and `more` forwards for gradients of weights."""
    products = sum(2.0 * p.rows * p.columns * p.depth * p.times for p in op.products)
    scores = sum(2.0 * p.rows * p.columns * p.depth * p.times for p in op.scores)
    forward = products + scores + op.flops[0]
    again = forward if recomputed == WHOLE or op.repeats(recomputed) else op.again(recomputed) * products
    return forward + again + (1 + more) * products + 2 * scores + op.flops[1]
