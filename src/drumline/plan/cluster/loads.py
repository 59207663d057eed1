"""What each rank of a pipeline does for one microbatch, how long all take, and what devices send each other in a step.

Messages are counted in bytes by purpose, and in seconds that compute does not hide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from operator import add
from typing import NamedTuple

from drumline.plan.cluster.device_memory import WEIGHT_BYTES, keeps_gradients, ranks_held
from drumline.plan.cluster.hardware import Cluster, DeviceLink
from drumline.plan.cluster.kernels import exposed, gather_seconds, reduce_seconds, slice_ops
from drumline.plan.cluster.layers import WORD, layers_of, tokens_of
from drumline.plan.cluster.layout import WHOLE, Layout
from drumline.plan.cluster.spent import Ops, Spent, all_ops
from drumline.plan.cluster.stages import (
    Alike,
    counts_of,
    formula_holds,
    num_sides,
    shape_of,
    simulated,
    simulated_few,
    stages_of,
)
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import find
from drumline.schedules.formulas import Pace, Paces


class ExchangeCost(NamedTuple):
    """Exposed seconds in every forward, in every backward, and once per step; and the bytes that a device sends."""

    forward: float = 0.0
    backward: float = 0.0
    once: float = 0.0
    bytes: float = 0.0


class Exchanging(NamedTuple):
    """How the data-parallel ranks of a layout exchange gradients and weights.

    `dense` and `experts` are the link and the number of ranks that share parameters which all tokens use, and those of
    experts; None for a single rank. `there` and `back` are bytes per parameter: of gradients, and of what returns.
    """

    layout: Layout
    dense: tuple[DeviceLink, int] | None
    experts: tuple[DeviceLink, int] | None
    there: float
    back: float
    is_hidden: bool
    sums_once: bool


def exchanging(cluster: Cluster, layout: Layout) -> Exchanging:
    """Return how the ranks of a layout exchange gradients and weights, which is the same for all of its stages."""
    group, tensor, there = layout.data * layout.context, layout.tensor, layout.practice.gradient_bytes
    shared = group // layout.expert
    practice = layout.practice
    return Exchanging(
        layout,
        (cluster.link(group, tensor), group) if group > 1 else None,
        (cluster.link(shared, tensor * layout.expert), shared) if shared > 1 else None,
        there,
        there if layout.zero == 0 else WEIGHT_BYTES,
        practice.overlap_data and (layout.pipeline == 1 or practice.overlap_staged),
        keeps_gradients(layout),
    )


def data_exchange(
    exchanging: Exchanging,
    parameters: tuple[float, float],
    forward_seconds: float,
    backward_seconds: float,
    num_layers: int = 1,
    base: tuple[float, float] = (0.0, 0.0),
) -> ExchangeCost:
    """Return the exchange of a rank's gradients and weights; the seconds are those of one microbatch on the rank.

    A reduce-scatter sums the gradients. All sums (ZeRO 0) or the new 16-bit weights come back. ZeRO 2 keeps no whole
    gradients and sums them after every microbatch; in a pipeline it keeps them, and sums once. ZeRO 3 keeps no whole
    weights either. It gathers them before every forward and every backward, layer by layer, so every layer pays for the
    start and the latency of a collective. `base` are bytes of frozen weights, which only ZeRO 3 gathers.
    """
    layout, dense, experts, there, back, is_hidden, sums_once = exchanging
    zero = layout.zero
    reduce = gather = reduced = gathered = 0.0
    for shared, count, frozen in ((dense, parameters[0], base[0]), (experts, parameters[1], base[1])):
        if shared and count:
            link, size = shared
            if zero >= 2:
                link = _by_layer(link, num_layers)
            reduce += gather_seconds(link, size, there * count)
            returned = back * count + (frozen if zero == 3 else 0.0)
            gather += gather_seconds(link, size, returned)
            reduced += there * count * (size - 1) / size
            gathered += returned * (size - 1) / size
    hidden, hidden_back = (forward_seconds, backward_seconds) if is_hidden else (0.0, 0.0)
    if zero == 0:
        return ExchangeCost(once=exposed(reduce + gather, hidden_back), bytes=reduced + gathered)
    times = layout.num_microbatches
    if zero == 3:
        sums = 1 if sums_once else times
        forward, backward, once = exposed(gather, hidden), exposed(gather, hidden_back), exposed(reduce, hidden_back)
        if sums == times:
            backward, once = exposed(gather + reduce, hidden_back), 0.0
        return ExchangeCost(forward, backward, once, sums * reduced + 2 * times * gathered)
    if zero == 2 and not sums_once:
        sent = times * reduced + gathered
        return ExchangeCost(0.0, exposed(reduce, hidden_back), exposed(gather, hidden), sent)
    return ExchangeCost(once=exposed(reduce, hidden_back) + exposed(gather, hidden), bytes=reduced + gathered)


@lru_cache(maxsize=4096)
def _by_layer(link: DeviceLink, num_layers: int) -> DeviceLink:
    """Return the link of an exchange that goes layer by layer."""
    start, late = num_layers * link.start_seconds, num_layers * link.latency_seconds
    return replace(link, start_seconds=start, latency_seconds=late)


def tied_exchange(transformer: Transformer, cluster: Cluster, layout: Layout) -> ExchangeCost:
    """Return the exchange of a tied embedding's gradient between the first rank and the last."""
    if layout.pipeline == 1 or not transformer.tied or transformer.frozen_base is not None:
        return ExchangeCost()
    size = layout.practice.gradient_bytes * transformer.vocabulary * transformer.hidden / layout.tensor
    return ExchangeCost(once=reduce_seconds(pipeline_link(cluster, layout), 2, size), bytes=size)


def pipeline_link(cluster: Cluster, layout: Layout) -> DeviceLink:
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

    What is recomputed sends its forward's messages again.
    """
    times, layers = layout.num_microbatches, layers_of(transformer, layout.share)
    sent = {"tensor": 0.0, "context": 0.0, "expert": 0.0}
    for slice_, part in rank.slices:
        for count, experts, recomputed in slice_.parts(layout):
            for operation in layers[experts].operations:
                if (message := operation.message) is not None:
                    forwards = 2 if recomputed == WHOLE or operation.repeats(recomputed) else 1
                    each = forwards * message.forward + message.backward + message.waited
                    sent[message.axis] += times * part * count * each * message.sent
    sides = sum(part * (2 - slice_.is_first - slice_.is_last) for slice_, part in rank.slices)
    between = times * sides * message_bytes(transformer, layout) if layout.pipeline > 1 else 0.0
    return Volumes(**sent, pipeline=between, data=data)


class RankWork(NamedTuple):
    """What ranks that are alike do for a microbatch, whatever the batch, the data-parallel ranks and ZeRO.

    `parts` is the work of each of their stages. `forward`, `backward_input` (with recomputation) and `backward_weight`
    are seconds, `total` all of them; `cast` is the number of weights that a step casts to 8 bits once.
    """

    alike: Alike
    ops: Ops
    parts: tuple[Ops, ...]
    parameters: tuple[float, float]
    base: tuple[float, float]
    num_layers: int
    cast: float
    forward: float
    backward: float
    backward_input: float
    backward_weight: float
    total: float


class PipelineWork(NamedTuple):
    """The ranks of a pipeline, and the seconds of a microbatch in every stage on its way down and up.

    `ends` are the first and the last stage of every rank, grouped as the ranks are. `crosses` says of every stage
    whether the next one is on another rank. With whole backwards, nothing is left to do on the way up.
    """

    ranks: tuple[RankWork, ...]
    ends: list[list[tuple[int, int]]]
    forward: list[float]
    backward: list[float]
    crosses: list[bool]
    is_whole: bool
    known: dict[float, list[tuple[float, float, float]]]

    def beside(self, hop: float) -> list[tuple[float, float, float]]:
        """Return what passes at least beside all work of a rank, all its backwards, and all its forwards.

        For each group of ranks that is the most of any of them; `hop` is how late a message arrives.
        """
        if hop not in self.known:
            self.known[hop] = self._beside(hop)
        return self.known[hop]

    def _beside(self, hop: float) -> list[tuple[float, float, float]]:
        late = [hop if crosses else 0.0 for crosses in self.crosses]
        # Before each stage, how long a microbatch comes down to it, and goes up from it to the first.
        down, up = (list(accumulate(map(add, each, late), initial=0.0)) for each in (self.forward, self.backward))
        there_and_back = down[-1] + up[-1]
        after = up if self.is_whole else [0.0] * len(up)
        return [
            (
                max(down[first] + after[first] for first, _ in ends),
                max(there_and_back - up[last + 1] + after[first] for first, last in ends),
                max(down[first] + there_and_back - down[last + 1] for first, last in ends),
            )
            for ends in self.ends
        ]


_WORKS: dict[tuple[object, ...], PipelineWork] = {}


def work_of(transformer: Transformer, cluster: Cluster, layout: Layout) -> PipelineWork:
    """Return the work of a pipeline's ranks, which layouts share that differ only in batch, data and ZeRO."""
    counts = counts_of(transformer, layout)
    place = counts, layout.schedule, layout.pipeline, layout.stages_per_rank
    key = (transformer, cluster.nodes, layout.share, *place)
    known = _WORKS.get(key)
    if known is None:
        if len(_WORKS) >= 20_000:  # layouts of a few plans
            _WORKS.clear()
        known = _WORKS[key] = _work(transformer, cluster, layout, counts)
    return known


def _work(transformer: Transformer, cluster: Cluster, layout: Layout, counts: tuple[int, ...]) -> PipelineWork:
    share, whole = layout.share, not find(layout.schedule).splits_backward
    ranks, nodes = ranks_held(transformer, layout), cluster.nodes
    known = {
        slice_: slice_ops(transformer, nodes, share, slice_)
        for slice_ in {slice_ for rank, *_ in ranks for slice_, _ in rank.slices}
    }
    if transformer.frozen_base is not None:  # its backwards run whole, whatever the schedule splits
        known = {slice_: ops.whole for slice_, ops in known.items()}
    # What the backward of an earlier stage waits for: I, or all of it.
    passes = {
        slice_: (ops.forward.total, (ops.backward if whole else ops.again + ops.backward_input).total)
        for slice_, ops in known.items()
    }
    works = []
    forward, backward = [0.0] * layout.num_stages, [0.0] * layout.num_stages
    shape = shape_of(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    for (rank, parameters, base, fp8, _), places in zip(ranks, shape.stages, strict=True):
        parts = tuple(known[slice_] for slice_, _ in rank.slices)
        ops = all_ops([own_ops.times(part) for own_ops, (_, part) in zip(parts, rank.slices, strict=True)])
        back = ops.backward
        works.append(
            RankWork(
                rank,
                ops,
                parts,
                parameters,
                base,
                sum(slice_.num_layers for slice_, _ in rank.slices),
                fp8,
                ops.forward.total,
                back.total,
                ops.again.total + ops.backward_input.total,
                ops.backward_weight.total,
                (ops.forward + back).total,
            )
        )
        for (slice_, _), stages in zip(rank.slices, places, strict=True):
            for stage in stages:
                forward[stage], backward[stage] = passes[slice_]
    return PipelineWork(tuple(works), shape.ends, forward, backward, shape.crosses, whole, {})


class Load(NamedTuple):
    """Ranks that are alike: their work for a microbatch, their waits for messages, and what they exchange.

    The last four are seconds of a microbatch, including everything that delays the rank.
    """

    work: RankWork
    waiting: float
    exchange: ExchangeCost
    forward: float
    backward_input: float
    backward_weight: float
    total: float

    @property
    def alike(self) -> Alike:
        """Return the ranks."""
        return self.work.alike

    @property
    def ops(self) -> Ops:
        """Return their work."""
        return self.work.ops

    @property
    def pace(self) -> Pace:
        """Return their pace, for formulas of schedules."""
        return Pace(len(self.work.alike.ranks), self.forward, self.backward_input, self.backward_weight)


def loads_of(
    transformer: Transformer, cluster: Cluster, layout: Layout, work: PipelineWork | None = None
) -> list[Load]:
    """Return the ranks of a pipeline; `work` is theirs, for whom has it already."""
    _, waiting = hop_seconds(transformer, cluster, layout)
    loads, how = [], exchanging(cluster, layout)
    for rank in (work or work_of(transformer, cluster, layout)).ranks:
        exchange = data_exchange(how, rank.parameters, rank.forward, rank.backward, rank.num_layers, rank.base)
        waits = waiting * rank.alike.sides
        forward, by_input = rank.forward + waits / 2 + exchange.forward, rank.backward_input + waits / 2
        by_weight = rank.backward_weight + exchange.backward
        loads.append(Load(rank, waits, exchange, forward, by_input, by_weight, forward + by_input + by_weight))
    return loads


def pipeline_seconds(
    transformer: Transformer, cluster: Cluster, layout: Layout, loads: Sequence[Load], *, exact: bool, rough: bool
) -> float:
    """Return the seconds of the pipeline: by formula where that is as good as simulating, or by simulating it."""
    hop, _ = hop_seconds(transformer, cluster, layout)
    times, formula = layout.num_microbatches, find(layout.schedule).makespan
    paces = Paces([load.pace for load in loads], times, layout.stages_per_rank, hop)
    if formula is not None and not exact and (rough or layout.pipeline == 1):
        return formula(paces)
    stages = stage_ops(transformer, cluster, layout, loads)
    if formula is not None and not exact and formula_holds(layout, stages):
        return formula(paces)
    if exact:
        return simulated(layout.schedule, stages, layout.pipeline, times, hop_seconds=hop).makespan
    return simulated_few(layout.schedule, stages, layout.pipeline, times, hop_seconds=hop)


def stage_ops(
    transformer: Transformer, cluster: Cluster, layout: Layout, loads: Sequence[Load] | None = None
) -> list[Ops]:
    """Return the seconds of a microbatch in every stage, including everything that delays its rank."""
    _, waiting = hop_seconds(transformer, cluster, layout)
    ops = [Ops()] * layout.num_stages
    for load in loads or loads_of(transformer, cluster, layout):
        forward, backward = (item / layout.stages_per_rank for item in (load.exchange.forward, load.exchange.backward))
        for rank in load.alike.ranks:
            stages = stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank)
            for (stage, _), own_ops in zip(stages, load.work.parts, strict=True):
                wait = waiting * num_sides(layout.schedule, stage, layout.pipeline, layout.num_stages) / 2
                ops[stage] = own_ops + Ops(Spent(wait + forward), Spent(), Spent(wait), Spent(backward))
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
