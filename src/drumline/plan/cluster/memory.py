"""What a device holds: weights and their optimizer, activations by the layer, and what comes and goes."""

from __future__ import annotations

from drumline.plan.cluster.estimate import Bytes
from drumline.plan.cluster.layers import tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.model.activations import activation_bytes, between, inside
from drumline.plan.cluster.model.parameters import (
    dense_layer_parameters,
    embedding_parameters,
    expert_parameters,
    head_parameters,
    shared_parameters,
)
from drumline.plan.cluster.model.transformer import Transformer
from drumline.plan.cluster.shape import pairs_held
from drumline.plan.cluster.slices import Alike

WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12  # the weight in 32 bits, and Adam's two averages


def device_parameters(transformer: Transformer, layout: Layout, rank: Alike) -> tuple[float, float]:
    """Return how many parameters a device of a pipeline rank has: those that all tokens use, and its experts'."""
    dense = experts = 0.0
    shared = shared_parameters(transformer) if transformer.experts else 0
    local = transformer.experts.num_experts / layout.expert if transformer.experts else 0.0
    for slice_, _ in rank.slices:
        dense += slice_.dense * dense_layer_parameters(transformer) + slice_.experts * shared
        experts += slice_.experts * local * expert_parameters(transformer)
        if slice_.is_first:
            dense += embedding_parameters(transformer)
        if slice_.is_last:
            dense += head_parameters(transformer)
        if slice_.is_first and slice_.is_last and transformer.tied:
            dense -= transformer.hidden * transformer.vocabulary
    return dense / layout.tensor, experts / layout.tensor


def sharded(layout: Layout, parameters: tuple[float, float]) -> float:
    """Return how many of a device's parameters are its own among the data-parallel ranks that share them."""
    group = layout.data * layout.context
    return parameters[0] / group + parameters[1] / (group // layout.expert)


def device_bytes(transformer: Transformer, layout: Layout, rank: Alike) -> Bytes:
    """Return what one device of a pipeline rank holds at its peak.

    The first rank holds most activations: as many microbatches as the schedule lets go ahead of their backwards.
    """
    parameters = device_parameters(transformer, layout, rank)
    whole, part = sum(parameters), sharded(layout, parameters)
    pairs = pairs_held(layout.schedule, rank.first, layout.pipeline, layout.num_microbatches, layout.stages_per_rank)
    dense = sum(slice_.dense for slice_, _ in rank.slices) / len(rank.slices)
    experts = sum(slice_.experts for slice_, _ in rank.slices) / len(rank.slices)
    kept = dense * activation_bytes(transformer, layout) if dense else 0.0
    kept += experts * activation_bytes(transformer, layout, experts=True) if experts else 0.0
    return Bytes(
        weights=WEIGHT_BYTES * (part if layout.zero >= 3 else whole),
        gradients=layout.practice.gradient_bytes * (part if layout.zero >= 2 else whole),
        optimizer=OPTIMIZER_BYTES * (part if layout.zero >= 1 else whole),
        activations=pairs * kept,
        buffers=_buffers(transformer, layout, rank, experts > 0),
    )


def _buffers(transformer: Transformer, layout: Layout, rank: Alike, has_experts: bool) -> float:
    """Return what comes and goes.

    A message each way; one layer while it is computed again; two layers' whole weights where they are sharded; the
    embedding's mask of every microbatch in flight; the head's input and its logits of one.
    """
    tokens = tokens_of(transformer, layout)
    along = layout.tensor if layout.sequence_parallel else 1
    size = 4.0 * tokens * transformer.hidden / along if layout.pipeline > 1 else 0.0
    if layout.recompute == "full":
        size += tokens * (between(transformer) / along + inside(transformer, layout, has_experts) / layout.tensor)
    if layout.zero >= 3 and layout.data * layout.context > 1:
        layer = dense_layer_parameters(transformer)
        if has_experts and transformer.experts:
            local = transformer.experts.num_experts / layout.expert
            layer = max(layer, shared_parameters(transformer) + int(local * expert_parameters(transformer)))
        size += 2 * WEIGHT_BYTES * layer / layout.tensor
    if transformer.dropout and any(slice_.is_first for slice_, _ in rank.slices):
        size += tokens * transformer.hidden * min(layout.pipeline, layout.num_microbatches) / along
    if any(slice_.is_last for slice_, _ in rank.slices):
        size += tokens * (4.0 * transformer.hidden / along + 6.0 * transformer.vocabulary / layout.tensor)
    return size
