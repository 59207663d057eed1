"""What a device holds: weights and their optimizer, activations by the layer, and what comes and goes.

The first rank holds most of them: as many microbatches as the schedule lets go ahead of their backwards.
"""

from __future__ import annotations

from drumline.plan.cluster.activations import between, inside
from drumline.plan.cluster.estimate import Bytes
from drumline.plan.cluster.layers import tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.shape import pairs_held, stages_of
from drumline.plan.cluster.slices import Slices
from drumline.plan.cluster.transformer import Transformer

WEIGHT_BYTES = 2
GRADIENT_BYTES = 4
OPTIMIZER_BYTES = 12  # the weight in 32 bits, and Adam's two averages


def device_bytes(transformer: Transformer, layout: Layout, slices: Slices, rank: int) -> Bytes:
    """Return what one device of a pipeline rank holds at its peak."""
    stages = stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank)
    dense, experts = slices.parameters(rank)
    group = layout.data * layout.context
    spread = group // layout.expert
    sharded, sharded_experts = dense / group, experts / spread
    own = dense + experts
    part = sharded + sharded_experts
    held = pairs_held(layout.schedule, rank, layout.pipeline, layout.num_microbatches, layout.stages_per_rank)
    kept = sum(slices.activations[stage] for stage, _ in stages) / len(stages)
    return Bytes(
        weights=WEIGHT_BYTES * (part if layout.zero >= 3 else own),
        gradients=GRADIENT_BYTES * (part if layout.zero >= 2 else own),
        optimizer=OPTIMIZER_BYTES * (part if layout.zero >= 1 else own),
        activations=held * kept,
        buffers=_buffers(transformer, layout, slices, [stage for stage, _ in stages]),
    )


def _buffers(transformer: Transformer, layout: Layout, slices: Slices, stages: list[int]) -> float:
    """Return what comes and goes: a message each way, one layer while it is computed again, a layer's whole weights where
    they are sharded, the embedding's mask of every microbatch in flight, and the head's logits of one.
    """
    tokens = tokens_of(transformer, layout)
    along = layout.tensor if layout.sequence_parallel else 1
    size = 4.0 * tokens * transformer.hidden / along if layout.pipeline > 1 else 0.0
    if layout.recompute == "full":
        size += tokens * (
            between(transformer) / along + inside(transformer, layout, slices.has_experts) / layout.tensor
        )
    if layout.zero >= 3:
        size += 2 * WEIGHT_BYTES * slices.largest_layer
    if 0 in stages and transformer.dropout:
        size += tokens * transformer.hidden * min(layout.pipeline, layout.num_microbatches) / along
    if layout.num_stages - 1 in stages:
        size += tokens * (4.0 * transformer.hidden / along + 6.0 * transformer.vocabulary / layout.tensor)
    return size
