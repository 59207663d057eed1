"""What a device holds: weights and optimizer state, activations per layer, and temporary buffers.

Until its backward, a layer keeps what the formulas of arXiv 2205.05198 say for each microbatch. They are written out by
item, so that they extend to other models. Per token and layer a device keeps, in bytes, with h the hidden width, t
tensor-parallel ranks, a heads and s the sequence,

    10h + 24h/t + 5as/t        every rank keeps all activations between the blocks, and its part of those inside
    34h/t + 5as/t              with sequence parallelism, it keeps only its part of both
    34h/t                      with the scores (5as/t) recomputed, or never stored
    2h                         with everything recomputed: the input of a layer

Latent attention keeps its n latent numbers before and after their norms, and for every head queries and keys
of width k, values and outputs of width v: 4n + 4a(k + v)/t instead of 8h/t. If the projections up to the heads are
recomputed, 2r + 4n + 2av/t: all heads share a key of width r, and queries, keys and values are not kept.

With FP8, inputs of products that are kept in 8 bits take half; fused attention keeps its output in 16 bits besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from drumline.plan.cluster.layers import ring_bytes
from drumline.plan.cluster.layout import Layout, casts_once, recomputed_ops
from drumline.plan.cluster.products import divided, fp8_weights, heads_of, tokens_of
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
    dense, whole, experts = _held(transformer, rank.slices)
    return dense / layout.tensor + whole, experts / layout.expert / layout.tensor


@lru_cache(maxsize=4096)
def _held(transformer: Transformer, slices: tuple[tuple[StageLayers, float], ...]) -> tuple[float, float, float]:
    """Return how many parameters of stages all tokens use, divided and whole, and how many their experts have."""
    dense = experts = 0.0
    whole = float(transformer.whole_parameters * sum(slice_.num_layers for slice_, _ in slices))
    every = transformer.experts.num_experts if transformer.experts else 0
    for slice_, _ in slices:
        dense += slice_.dense * transformer.dense_layer_parameters + slice_.experts * transformer.shared_parameters
        experts += slice_.experts * every * transformer.expert_parameters
        if slice_.is_first:
            dense += transformer.embedding_parameters
        if slice_.is_last:
            dense += transformer.head_parameters
        if slice_.is_first and slice_.is_last and transformer.tied:
            dense -= transformer.hidden * transformer.vocabulary
    return dense - whole, whole, experts


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
    kept = stage_activations(transformer, layout, *(slice_ for slice_, _ in rank.slices)) / len(rank.slices)
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


def stage_activations(transformer: Transformer, layout: Layout, *slices: StageLayers) -> float:
    """Return the bytes that a device keeps for one microbatch in these stages until its backward."""
    counts: dict[tuple[bool, str], int] = {}
    for slice_ in slices:
        for count, experts, how in slice_.parts(layout.recompute):
            counts[experts, how] = counts.get((experts, how), 0) + count
    return sum(
        count * activation_bytes(transformer, layout, experts=experts, recompute=how)
        for (experts, how), count in counts.items()
    )


def _buffers(transformer: Transformer, layout: Layout, rank: Alike, has_experts: bool) -> float:
    """Return the bytes of temporary buffers.

    A message each way; one layer, or its queries, keys and values, in recomputation; the gathered keys and values of
    a layer, and their gradients; the whole weights of two layers if sharded; the 8-bit weights of a layer if
    not held; the embedding's mask of every microbatch in flight; the head's input and logits of one microbatch.
    """
    tokens = tokens_of(transformer, layout)
    along = layout.tensor if layout.sequence_parallel else 1
    size = 4.0 * tokens * transformer.hidden / along if layout.pipeline > 1 else 0.0
    if layout.recompute.startswith("full"):
        kept = inside(transformer, layout, experts=has_experts) / layout.tensor
        size += tokens * (between(transformer, layout) / along + kept)
    elif "projections" in recomputed_ops(layout) and transformer.latent is not None:
        size += tokens * 2.0 * (heads_of(transformer, layout) - transformer.latent.rotary_head)
    if layout.context > 1 and not layout.practice.overlap_context:
        size += 2 * ring_bytes(transformer, layout)
    if layout.zero >= 3 and layout.data * layout.context > 1:
        layer = transformer.dense_layer_parameters
        if has_experts and transformer.experts:
            local = transformer.experts.num_experts / layout.expert
            layer = max(layer, transformer.shared_parameters + int(local * transformer.expert_parameters))
        size += 2 * WEIGHT_BYTES * divided(transformer, layout, layer)
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
    width, word = transformer.num_heads * transformer.value_width, _input_bytes(layout)
    size = _attended(transformer, layout, word, ops)
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


def _attended(transformer: Transformer, layout: Layout, word: float, ops: Sequence[str]) -> float:
    """Return the bytes per token of queries, keys and values, and of the latents that they are projected from.

    Every tensor-parallel rank keeps whole latents, as they enter and as they leave their norms.
    """
    size = 2.0 * heads_of(transformer, layout) * layout.tensor
    if (latent := transformer.latent) is None:
        return size
    if "projections" in ops:
        size = 2.0 * latent.rotary_head * layout.tensor
    return size + (2.0 + (0.0 if "norms" in ops else word)) * latent.narrow * layout.tensor


def peak_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the bytes of the fullest device: the total of the items of `estimate`."""
    counts = counts_of(transformer, layout)
    kinds = alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    return max(device_bytes(transformer, layout, one).total for one in kinds)
