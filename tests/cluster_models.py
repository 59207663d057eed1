"""A small cluster, small transformers, and an estimate in a few lines that the planner can be tested against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.plan.cluster.device_memory import Bytes, stage_activations
from drumline.plan.cluster.estimate import Estimate, Least, Seconds
from drumline.plan.cluster.hardware import Cluster, Device, DeviceLink
from drumline.plan.cluster.layout import Layout, StageLayers, whole_layers
from drumline.plan.cluster.loads import Volumes
from drumline.plan.cluster.stages import stage_weights
from drumline.plan.cluster.transformer import ExpertShape, LatentAttention, Transformer
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.survey import Evaluator, Survey
from drumline.schedules import find

GIB = 2**30


def small_cluster(num_devices: int = 8, *, per_node: int = 4, memory: float = 2 * GIB) -> Cluster:
    return Cluster(
        Device("toy", 1e13, memory, 1e11), num_devices, per_node, DeviceLink(1e-6, 2e11), DeviceLink(5e-6, 2e10)
    )


def activation_bytes(transformer: Transformer, layout: Layout, *, experts: bool = False) -> float:
    """Return the bytes that a device keeps for one microbatch in one layer until its backward."""
    return stage_activations(transformer, layout, StageLayers(int(not experts), int(experts)))


def small_transformer(**changes: object) -> Transformer:
    numbers: dict[str, object] = {
        "num_layers": 12,
        "hidden": 1024,
        "num_heads": 8,
        "vocabulary": 32000,
        "sequence": 1024,
    }
    return Transformer("small", **{**numbers, **changes})  # type: ignore[arg-type]


def sparse_transformer() -> Transformer:
    return small_transformer(experts=ExpertShape(num_experts=8, per_token=2, feedforward=2048))


def latent_transformer(**changes: object) -> Transformer:
    """Return a small transformer with latent attention; its heads are wide, so that projections are worth a lot."""
    latent = LatentAttention(queries=256, keys_values=128, head=128, rotary_head=64, value_head=128)
    return small_transformer(latent=latent, gated=True, biased=False, dropout=False, **changes)


def num_parameters(transformer: Transformer) -> int:
    """Return all parameters, a tied embedding once."""
    tied = transformer.hidden * transformer.vocabulary if transformer.tied else 0
    layers = sum(_layer_parameters(transformer, layer) for layer in range(transformer.num_layers))
    return layers + transformer.embedding_parameters + transformer.head_parameters - tied


def _layer_parameters(transformer: Transformer, layer: int) -> int:
    """Return all parameters of one layer."""
    if layer < transformer.num_dense_layers or transformer.experts is None:
        return transformer.dense_layer_parameters
    return transformer.shared_parameters + transformer.experts.num_experts * transformer.expert_parameters


def rank_weights(transformer: Transformer, counts: Sequence[int], pipeline: int, schedule: str) -> list[float]:
    """Return the work of every rank, counted in layers."""
    ranks = [0.0] * pipeline
    homes = find(schedule).layout(pipeline, len(counts) // pipeline).homes
    for home, weight in zip(homes, stage_weights(transformer, counts), strict=True):
        ranks[home] += weight
    return ranks


@dataclass(frozen=True)
class Rough:
    """Rough estimates that keep to what the survey takes for true; its numbers say how much each thing costs."""

    split: float = 0.02
    exchange: float = 1.0
    launch: float = 0.05
    stash: float = 1.0

    def surveyed(
        self, transformer: Transformer, cluster: Cluster, batch: int, pins: Pins, refine: Evaluator | None = None
    ) -> Survey:
        """Return a survey of layouts by these estimates; `refine` is exact, unless these are."""
        parts = self, refine or self, self.weigh, self.least, self.more, self.weigh_fixed
        return Survey(transformer, cluster, batch, pins, *parts)

    def weigh(self, transformer: Transformer, layout: Layout) -> float:
        """Return the bytes of a device."""
        return self(transformer, small_cluster(), layout).bytes.total

    def weigh_fixed(self, transformer: Transformer, layout: Layout) -> float:
        """Return the bytes of a device's weights, gradients and optimizer."""
        held = self(transformer, small_cluster(), layout).bytes
        return held.weights + held.gradients + held.optimizer

    def least(self, transformer: Transformer, cluster: Cluster, layout: Layout) -> Least:
        """Return what a layout takes, in place of a bound; its work is shared out evenly by the weights of stages."""
        took = self(transformer, cluster, layout).seconds
        weights = stage_weights(transformer, layout.counts)
        work = took.compute + took.recompute + took.tensor + took.context + took.expert
        even = sum(weights) / (len(weights) * max(weights)) * work
        return Least(took.total, even, took.total, took.total - took.data_exposed)

    def more(self, transformer: Transformer, cluster: Cluster, layout: Layout) -> float:
        """Return what recomputation adds to a layout."""
        return self(transformer, cluster, layout).seconds.recompute

    def __call__(self, transformer: Transformer, cluster: Cluster, layout: Layout) -> Estimate:
        tokens = layout.batch * transformer.sequence
        parameters = 12 * transformer.num_layers * transformer.hidden**2 + transformer.vocabulary * transformer.hidden
        flops = 6 * parameters * tokens
        ranks = rank_weights(transformer, layout.counts, layout.pipeline, layout.schedule)
        uneven = max(ranks) * layout.pipeline / sum(ranks)
        ideal = flops / layout.num_devices / cluster.device.flops_per_second
        compute = ideal * uneven * (1 + self.launch / layout.microbatch)
        again = _share(transformer, layout, 0.0, 0.05, 0.33) * compute
        tensor = compute * self.split * (layout.tensor - 1)
        context = compute * self.split * (layout.context - 1) / 2
        expert = compute * self.split * (layout.expert - 1) / 3
        split = {"1f1b": 1.0, "zb-h1": 0.4, "zb-v": 0.1, "v-half": 0.6, "dualpipe-v": 0.2}
        others = layout.pipeline - 1
        share = others / (layout.num_microbatches * layout.stages_per_rank) * split.get(layout.schedule, 1.0)
        bubble = (compute + again + tensor) * share
        held = parameters / (layout.tensor * layout.pipeline)
        sharers = layout.data * layout.context
        ways = (1, 1, 2, 3 * layout.num_microbatches)[layout.zero] if sharers > 1 else 0
        data = self.exchange * 2 * held * ways / cluster.inter_node.bytes_per_second
        optimizer = held * 16 / (sharers if layout.zero else 1) / cluster.device.memory_bytes_per_second
        in_flight = min(layout.num_microbatches, layout.pipeline) * (1 + (layout.stages_per_rank > 2) * 0.2)
        kept = _share(transformer, layout, 34.0, 24.0, 2.0)
        piece = transformer.sequence * transformer.hidden * transformer.num_layers / layout.pipeline / layout.context
        activations = self.stash * kept * piece * layout.microbatch * in_flight
        activations /= layout.tensor if layout.sequence_parallel else (1 + layout.tensor) / 2
        shards = [1.0 / sharers if layout.zero >= stage else 1.0 for stage in (1, 2, 3)]
        return Estimate(
            Seconds(compute, again, tensor, context, expert, ideal * 0.001 * others, data, bubble, optimizer),
            Bytes(2 * held * shards[2], 4 * held * shards[1], 12 * held * shards[0], activations, 1e6),
            Volumes(tensor * 1e9, context * 1e9, expert * 1e9, 1e6 * others, 2 * held * ways),
            flops / layout.num_devices,
            bubble / (compute + again + tensor + bubble),
        )


def _share(transformer: Transformer, layout: Layout, none: float, selective: float, full: float) -> float:
    """Return a number by recomputation; between those of none and full, if only some layers are recomputed."""
    if layout.recompute.startswith("full"):
        most = max(layout.counts)
        return none + (full - none) * whole_layers(layout.recompute, most) / most
    return selective if layout.recompute == "selective" else none
