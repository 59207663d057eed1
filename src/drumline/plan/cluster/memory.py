"""What a device holds: weights and optimizer state, activations per layer, and temporary buffers.

Until its backward, a layer keeps what the formulas of arXiv 2205.05198 say for each microbatch. They are written out by
item, so that they extend to other models. Per token and layer a device keeps, in bytes, with h the hidden width, t
tensor-parallel ranks, a heads and s the sequence,

    10h + 24h/t + 5as/t        every rank keeps all activations between the blocks, and its part of those inside
    34h/t + 5as/t              with sequence parallelism, it keeps only its part of both
    34h/t                      with the scores (5as/t) recomputed, or never stored
    2h                         with everything recomputed: the input of a layer
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.cluster.layers import keys_of, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.stages import Alike, alike, counts_of, pairs_held
from drumline.plan.cluster.transformer import Transformer

WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12  # the weight in 32 bits, and Adam's two averages


@dataclass(frozen=True, slots=True)
class Bytes:
    """A device's bytes at the peak, on the rank that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """Return the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def device_parameters(transformer: Transformer, layout: Layout, rank: Alike) -> tuple[float, float]:
    """Return how many parameters a device of a pipeline rank holds: those that all tokens use, and its experts'."""
    dense = experts = 0.0
    shared = transformer.shared_parameters
    local = transformer.experts.num_experts / layout.expert if transformer.experts else 0.0
    for slice_, _ in rank.slices:
        dense += slice_.dense * transformer.dense_layer_parameters + slice_.experts * shared
        experts += slice_.experts * local * transformer.expert_parameters
        if slice_.is_first:
            dense += transformer.embedding_parameters
        if slice_.is_last:
            dense += transformer.head_parameters
        if slice_.is_first and slice_.is_last and transformer.tied:
            dense -= transformer.hidden * transformer.vocabulary
    return dense / layout.tensor, experts / layout.tensor


def sharded(layout: Layout, parameters: tuple[float, float]) -> float:
    """Return a device's own share of its parameters among the data-parallel ranks that share them."""
    group = layout.data * layout.context
    return parameters[0] / group + parameters[1] / (group // layout.expert)


def device_bytes(transformer: Transformer, layout: Layout, rank: Alike) -> Bytes:
    """Return what one device of a pipeline rank holds at its peak.

    The first rank holds the most activations: as many microbatches as the schedule runs ahead of their backwards.
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
    """Return the bytes of temporary buffers.

    A message each way; one layer during recomputation; the whole weights of two layers if they are sharded; the
    embedding's mask of every microbatch in flight; the head's input and logits of one microbatch.
    """
    tokens = tokens_of(transformer, layout)
    along = layout.tensor if layout.sequence_parallel else 1
    size = 4.0 * tokens * transformer.hidden / along if layout.pipeline > 1 else 0.0
    if layout.recompute == "full":
        size += tokens * (between(transformer) / along + inside(transformer, layout, has_experts) / layout.tensor)
    if layout.zero >= 3 and layout.data * layout.context > 1:
        layer = transformer.dense_layer_parameters
        if has_experts and transformer.experts:
            local = transformer.experts.num_experts / layout.expert
            layer = max(layer, transformer.shared_parameters + int(local * transformer.expert_parameters))
        size += 2 * WEIGHT_BYTES * layer / layout.tensor
    if transformer.dropout and any(slice_.is_first for slice_, _ in rank.slices):
        size += tokens * transformer.hidden * min(layout.pipeline, layout.num_microbatches) / along
    if any(slice_.is_last for slice_, _ in rank.slices):
        size += tokens * (4.0 * transformer.hidden / along + 6.0 * transformer.vocabulary / layout.tensor)
    return size


def activation_bytes(transformer: Transformer, layout: Layout, *, experts: bool = False) -> float:
    """Return the bytes that a device keeps for one microbatch in one layer until its backward.

    >>> from drumline.plan.cluster.layout import Practice
    >>> gpt = Transformer("22B", num_layers=48, hidden=6144, num_heads=64, vocabulary=51200, sequence=2048)
    >>> plain = Layout(batch=4, microbatch=4, tensor=8, practice=Practice(flash_attention=False))
    >>> round(48 * activation_bytes(gpt, plain) / 2**30, 2)
    59.25
    """
    tokens = tokens_of(transformer, layout)
    along = layout.tensor if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return 2.0 * tokens * transformer.hidden / along
    return tokens * (between(transformer) / along + inside(transformer, layout, experts) / layout.tensor)


def between(transformer: Transformer) -> float:
    """Return the bytes per token between a layer's blocks: inputs of norms and products, and dropout masks."""
    return (8.0 + (2.0 if transformer.dropout else 0.0)) * transformer.hidden


def inside(transformer: Transformer, layout: Layout, experts: bool) -> float:
    """Return the bytes per token inside a layer's blocks, on all tensor-parallel ranks together."""
    width = transformer.num_heads * transformer.head_width
    size = 2.0 * (width + keys_of(transformer, layout) * layout.tensor) + 2.0 * width
    if layout.practice.flash_attention:
        size += 4.0 * transformer.num_heads  # one 32-bit sum of exponentials per row
    elif layout.recompute == "none":
        size += (5.0 if transformer.dropout else 2.0) * transformer.num_heads * transformer.sequence
    each = 6.0 if transformer.gated else 4.0
    if experts and (found := transformer.experts) is not None:
        copies = 2.0 * found.per_token * transformer.hidden
        return size + copies + each * (found.per_token + found.num_shared) * found.feedforward
    return size + each * transformer.feedforward


def peak_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the bytes of the fullest device: the total of the items of `estimate`."""
    counts = counts_of(transformer, layout)
    kinds = alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    return max(device_bytes(transformer, layout, one).total for one in kinds)
