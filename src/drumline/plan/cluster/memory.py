"""What a device holds: weights and optimizer state, activations per layer, and temporary buffers.

Until its backward, a layer keeps what the formulas of arXiv 2205.05198 say for each microbatch. They are written out by
item, so that they extend to other models. Per token and layer a device keeps, in bytes, with h the hidden width, t
tensor-parallel ranks, a heads and s the sequence,

    10h + 24h/t + 5as/t        every rank keeps all activations between the blocks, and its part of those inside
    34h/t + 5as/t              with sequence parallelism, it keeps only its part of both
    34h/t                      with the scores (5as/t) recomputed, or never stored
    2h                         with everything recomputed: the input of a layer

With FP8, inputs of products that are kept in 8 bits take half; fused attention keeps its output in 16 bits besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.plan.cluster.layers import ring_bytes
from drumline.plan.cluster.layout import Layout, casts_once, recomputed_ops
from drumline.plan.cluster.products import fp8_weights, keys_of, tokens_of
from drumline.plan.cluster.stages import Alike, StageLayers, alike, counts_of, pairs_held
from drumline.plan.cluster.transformer import Transformer

WEIGHT_BYTES = 2
OPTIMIZER_BYTES = 12  # the weight in 32 bits, and Adam's two averages
FP8_BYTES = 2  # a weight in 8 bits, and once more transposed


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
    has_experts = any(slice_.experts for slice_, _ in rank.slices)
    kept = sum(stage_activations(transformer, layout, slice_) for slice_, _ in rank.slices) / len(rank.slices)
    whole_gradients = layout.zero < 2 or keeps_gradients(layout)
    return Bytes(
        weights=WEIGHT_BYTES * (part if layout.zero >= 3 else whole) + FP8_BYTES * held_fp8(transformer, layout, rank),
        gradients=layout.practice.gradient_bytes * (whole if whole_gradients else part),
        optimizer=OPTIMIZER_BYTES * (part if layout.zero >= 1 else whole),
        activations=pairs * kept,
        buffers=_buffers(transformer, layout, rank, has_experts),
    )


def held_fp8(transformer: Transformer, layout: Layout, rank: Alike) -> float:
    """Return how many weights a device of a pipeline rank casts once in a step and holds in 8 bits."""
    if not casts_once(layout):
        return 0.0
    dense, experts = (fp8_weights(transformer, layout, experts=one) for one in (False, True))
    return sum(slice_.dense * dense + slice_.experts * experts for slice_, _ in rank.slices)


def keeps_gradients(layout: Layout) -> bool:
    """Whether ranks keep whole gradients until the step's last backward although ZeRO would shard them.

    Stages of a pipeline do: a sum for every microbatch would stand in the way of every backward.

    >>> keeps_gradients(Layout(batch=8, pipeline=2, data=2, zero=3)), keeps_gradients(Layout(batch=8, data=4, zero=3))
    (True, False)
    """
    return layout.pipeline > 1 and layout.num_microbatches > 1


def stage_activations(transformer: Transformer, layout: Layout, slice_: StageLayers) -> float:
    """Return the bytes that a device keeps for one microbatch in one stage until its backward."""
    return sum(
        count * activation_bytes(transformer, layout, experts=experts, recompute=how)
        for count, experts, how in slice_.parts(layout.recompute)
    )


def _buffers(transformer: Transformer, layout: Layout, rank: Alike, has_experts: bool) -> float:
    """Return the bytes of temporary buffers.

    A message each way; one layer during recomputation; the gathered keys and values of a layer, and their gradients;
    the whole weights of two layers if they are sharded; the 8-bit weights of a layer if they are not held; the
    embedding's mask of every microbatch in flight; the head's input and logits of one microbatch.
    """
    tokens = tokens_of(transformer, layout)
    along = layout.tensor if layout.sequence_parallel else 1
    size = 4.0 * tokens * transformer.hidden / along if layout.pipeline > 1 else 0.0
    if layout.recompute.startswith("full"):
        kept = inside(transformer, layout, experts=has_experts) / layout.tensor
        size += tokens * (between(transformer, layout) / along + kept)
    if layout.context > 1 and not layout.practice.overlap_context:
        size += 2 * ring_bytes(transformer, layout)
    if layout.zero >= 3 and layout.data * layout.context > 1:
        layer = transformer.dense_layer_parameters
        if has_experts and transformer.experts:
            local = transformer.experts.num_experts / layout.expert
            layer = max(layer, transformer.shared_parameters + int(local * transformer.expert_parameters))
        size += 2 * WEIGHT_BYTES * layer / layout.tensor
    if layout.practice.fp8 and not casts_once(layout):
        size += fp8_weights(transformer, layout, experts=has_experts)
    if transformer.dropout and any(slice_.is_first for slice_, _ in rank.slices):
        size += tokens * transformer.hidden * min(layout.pipeline, layout.num_microbatches) / along
    if any(slice_.is_last for slice_, _ in rank.slices):
        logits = layout.practice.logit_bytes * transformer.vocabulary / layout.tensor
        size += tokens * (4.0 * transformer.hidden / along + logits)
    return size


def activation_bytes(transformer: Transformer, layout: Layout, *, experts: bool = False, recompute: str = "") -> float:
    """Return the bytes that a device keeps for one microbatch in one layer until its backward.

    A layer may `recompute` otherwise than the layout says.

    >>> from drumline.plan.cluster.layout import Practice
    >>> gpt = Transformer("22B", num_layers=48, hidden=6144, num_heads=64, vocabulary=51200, sequence=2048)
    >>> plain = Layout(batch=4, microbatch=4, tensor=8, practice=Practice(flash_attention=False))
    >>> round(48 * activation_bytes(gpt, plain) / 2**30, 2)
    59.25
    """
    tokens = tokens_of(transformer, layout)
    along = layout.tensor if layout.sequence_parallel else 1
    if (recompute or layout.recompute) == "full":
        return 2.0 * tokens * transformer.hidden / along
    ops = recomputed_ops(layout, recompute)
    kept = inside(transformer, layout, experts=experts, ops=ops) / layout.tensor
    return tokens * (between(transformer, layout, ops) / along + kept)


def between(transformer: Transformer, layout: Layout, ops: Sequence[str] = ()) -> float:
    """Return the bytes per token between a layer's blocks: inputs of norms and products, and dropout masks.

    The inputs of products are outputs of norms; if norms are recomputed, only those of the norms are kept.
    """
    kept = 4.0 + (0.0 if "norms" in ops else 2 * _input_bytes(layout))
    return (kept + (2.0 if transformer.dropout else 0.0)) * transformer.hidden


def _input_bytes(layout: Layout) -> float:
    """Return the bytes of a number that a product with weights keeps for the weights' gradient."""
    return 1.0 if layout.practice.fp8 and layout.practice.keeps_fp8_inputs else 2.0


def inside(transformer: Transformer, layout: Layout, *, experts: bool, ops: Sequence[str] = ()) -> float:
    """Return the bytes per token inside a layer's blocks, on all tensor-parallel ranks together."""
    width, word = transformer.num_heads * transformer.head_width, _input_bytes(layout)
    size = 2.0 * (width + keys_of(transformer, layout) * layout.tensor)
    if not layout.practice.flash_attention:
        scores = (5.0 if transformer.dropout else 2.0) * transformer.num_heads * transformer.sequence
        size += word * width + (0.0 if "attention" in ops else scores)
    elif "attention" not in ops:
        # The output, which the product after it may keep in 8 bits besides, and one 32-bit sum of exponentials per row.
        size += (2.0 if word == 2.0 else 2.0 + word) * width + 4.0 * transformer.num_heads
    each = (4.0 if transformer.gated else 2.0) + (0.0 if "activation" in ops else word)
    if experts and (found := transformer.experts) is not None:
        shared = each * found.num_shared * found.feedforward
        routed = word * found.per_token * transformer.hidden + each * found.per_token * found.feedforward
        return size + shared + (0.0 if "experts" in ops else routed)
    return size + each * transformer.feedforward


def peak_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the bytes of the fullest device: the total of the items of `estimate`."""
    counts = counts_of(transformer, layout)
    kinds = alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    return max(device_bytes(transformer, layout, one).total for one in kinds)
