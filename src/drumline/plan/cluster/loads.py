"""What each rank of a pipeline does for one microbatch, and what each stage does."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.cluster.exchange import Exchange, data_exchange, message_bytes, pipeline_link
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import Ops, Work, gather_seconds
from drumline.plan.cluster.layers import WORD, embedding_ops, head_ops, layer_ops, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.memory import device_parameters
from drumline.plan.cluster.shape import num_sides, stages_of
from drumline.plan.cluster.slices import Alike, Slice, alike, counts_of, slices_of
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules.formulas import Pace


@dataclass(frozen=True, slots=True)
class Load:
    """Ranks that are alike: their work for a microbatch, what they wait for messages, and what they exchange."""

    alike: Alike
    ops: Ops
    waiting: float
    parameters: tuple[float, float]
    exchange: Exchange

    @property
    def pace(self) -> Pace:
        """Return the seconds of a microbatch, everything that holds the rank up included."""
        return Pace(
            len(self.alike.ranks),
            self.ops.forward.total + self.waiting / 2 + self.exchange.forward,
            self.ops.again.total + self.ops.backward_input.total + self.waiting / 2,
            self.ops.backward_weight.total + self.exchange.backward,
        )


def loads_of(transformer: Transformer, cluster: Cluster, layout: Layout, waiting: float) -> list[Load]:
    """Return the ranks of a pipeline; `waiting` is what a stage waits on each side that has a neighbour."""
    counts = counts_of(transformer, layout)
    known: dict[Slice, Ops] = {}
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
        found.append(Load(one, ops, waiting * sides, parameters, exchange))
    return found


def stage_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> list[Ops]:
    """Return what a microbatch takes in every stage, with everything that holds its rank up: what `exact` simulates."""
    _, waiting = hop_seconds(transformer, cluster, layout)
    return stages_of_loads(transformer, cluster, layout, loads_of(transformer, cluster, layout, waiting), waiting)


def stages_of_loads(
    transformer: Transformer, cluster: Cluster, layout: Layout, loads: list[Load], waiting: float
) -> list[Ops]:
    """Return the stages of ranks whose loads are known."""
    slices = slices_of(transformer, counts_of(transformer, layout))
    known = {slice_: slice_ops(transformer, cluster, layout, slice_) for slice_ in set(slices)}
    exchanges = {rank: load.exchange for load in loads for rank in load.alike.ranks}
    found = [Ops()] * len(slices)
    for rank, exchange in exchanges.items():
        forward, backward = (one / layout.stages_per_rank for one in (exchange.forward, exchange.backward))
        for stage, _ in stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank):
            wait = waiting * num_sides(layout.schedule, stage, layout.pipeline, layout.num_stages) / 2
            found[stage] = known[slices[stage]] + Ops(Work(wait + forward), Work(), Work(wait), Work(backward))
    return found


def slice_ops(transformer: Transformer, cluster: Cluster, layout: Layout, slice_: Slice) -> Ops:
    """Return what a microbatch takes in a stage."""
    ops = layer_ops(transformer, cluster, layout).times(slice_.dense) if slice_.dense else Ops()
    if slice_.experts:
        ops = ops + layer_ops(transformer, cluster, layout, experts=True).times(slice_.experts)
    if slice_.is_first:
        ops = ops + embedding_ops(transformer, cluster, layout)
    if slice_.is_last:
        ops = ops + head_ops(transformer, cluster, layout)
    return ops


def hop_seconds(transformer: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return how late a message between stages comes, and how long a stage waits for it on each side."""
    if layout.pipeline == 1:
        return 0.0, 0.0
    seconds = pipeline_link(cluster, layout).seconds(message_bytes(transformer, layout))
    if layout.practice.scatter_gather and not layout.sequence_parallel:
        whole = WORD * tokens_of(transformer, layout) * transformer.hidden
        seconds += gather_seconds(cluster.link(layout.tensor, 1), layout.tensor, whole)
    if layout.practice.overlap_pipeline:
        return seconds, 0.0
    return 0.0, seconds if layout.practice.duplex else 2 * seconds
