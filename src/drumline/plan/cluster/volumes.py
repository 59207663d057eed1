"""Bytes that a device sends in a step, by what they are for; and those of a fully sharded model beside a pipeline's."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.cluster.estimate import Volumes
from drumline.plan.cluster.layers import WORD, ring_bytes, routed_bytes, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.memory import GRADIENT_BYTES, WEIGHT_BYTES
from drumline.plan.cluster.parameters import num_parameters
from drumline.plan.cluster.transformer import Transformer


def message_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return what a device sends of one microbatch to the next stage.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> message_bytes(gpt, Layout(batch=64, tensor=8, pipeline=8)) / 2**20
    6.0
    """
    part = layout.tensor if layout.practice.scatter_gather or layout.sequence_parallel else 1
    return WORD * tokens_of(transformer, layout) * transformer.hidden / part


def volumes_of(
    transformer: Transformer, layout: Layout, num_layers: int, num_expert_layers: int, data: float
) -> Volumes:
    """Return what a device sends that has so many layers; `data` is what the exchange of gradients takes."""
    times, ranks = layout.num_microbatches, layout.tensor
    whole = WORD * tokens_of(transformer, layout) * transformer.hidden
    both = 2 * whole * (ranks - 1) / ranks
    passes = 3 if layout.recompute == "full" else 2
    gathers = 1 if layout.sequence_parallel else 0  # of the inputs that are kept in parts, half an exchange each
    ring = ring_bytes(transformer, layout) * (layout.context - 1) / layout.context
    again = 2 if layout.recompute == "full" else 1
    routed = routed_bytes(transformer, layout) if transformer.experts and layout.expert > 1 else 0.0
    hops = 2 * layout.stages_per_rank if layout.pipeline > 1 else 0
    return Volumes(
        tensor=times * num_layers * (2 * passes + gathers) * both,
        context=times * num_layers * (again + 2) * ring,
        expert=times * num_expert_layers * 2 * (again + 1) * routed,
        pipeline=times * hops * message_bytes(transformer, layout),
        data=data,
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Bytes that a device sends in a step where weights are sharded, and where the layers are."""

    sharded: float
    pipeline: float

    @property
    def ratio(self) -> float:
        """Return how many times as much the sharded one sends."""
        return self.sharded / self.pipeline


def sharded_against_pipeline(transformer: Transformer, num_devices: int, *, tokens: int) -> Comparison:
    """Compare FSDP (ZeRO 3) with a pipeline of one sequence per microbatch, both of `num_devices`, on as many tokens each.

    FSDP gathers all weights for forward and again for backward, and scatters all gradients: three times the model, once a step
    if its share of the tokens is one microbatch. A stage sends a microbatch's activations on and their gradients back.

    >>> from drumline.plan.cluster.models import model
    >>> found = sharded_against_pipeline(model("llama-3-70b"), 8, tokens=2**19)
    >>> round(found.sharded / 1e9), round(found.pipeline / 1e9)
    (494, 15)
    """
    away = (num_devices - 1) / num_devices
    sharded = num_parameters(transformer) * (2 * WEIGHT_BYTES + GRADIENT_BYTES) * away
    activations = WORD * tokens * transformer.hidden
    return Comparison(sharded, 2 * activations * away)
