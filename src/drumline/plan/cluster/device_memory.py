"""What a device holds: weights and optimizer state, activations per layer, and temporary buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from drumline.plan.cluster.layers import (
    WORD,
    Layer,
    fp8_weights,
    layers_of,
    product_weights,
    ring_bytes,
    tokens_of,
    wide_of,
)
from drumline.plan.cluster.layout import Layout, StageLayers, recomputed_ops
from drumline.plan.cluster.practice import OPTIMIZERS
from drumline.plan.cluster.stages import Alike, alike, counts_of, pairs_held
from drumline.plan.cluster.transformer import Transformer

WEIGHT_BYTES = 2
OPTIMIZER_BYTES = OPTIMIZERS["adamw"].state_bytes  # the weight in 32 bits, and Adam's two averages
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


def device_parameters(
    transformer: Transformer, layout: Layout, rank: Alike, layers: Sequence[Layer] = ()
) -> tuple[float, float]:
    """Return how many parameters a device of a pipeline rank holds: those that all tokens use, and its experts'.

    `layers` are those of the layout, for a caller that has them already.
    """
    dense, routed = layers or layers_of(transformer, layout.share)
    used = experts = ends = 0.0
    for slice_, _ in rank.slices:
        used += slice_.dense * dense.parameters + slice_.experts * routed.parameters
        experts += slice_.experts * routed.expert_parameters
        if slice_.is_first:
            ends += transformer.embedding_parameters
        if slice_.is_last:
            ends += transformer.head_parameters
        if slice_.is_first and slice_.is_last and transformer.tied:
            ends -= transformer.hidden * transformer.vocabulary
    return used + ends / layout.tensor, experts


def trained_parameters(
    transformer: Transformer, layout: Layout, rank: Alike, layers: Sequence[Layer] = ()
) -> tuple[float, float]:
    """Return how many parameters a device of a pipeline rank trains: of what all tokens use, and of its experts.

    Over a frozen base these are the adapters' alone, which tensor-parallel ranks divide as they divide the base.
    """
    layers = layers or layers_of(transformer, layout.share)
    if (base := transformer.frozen_base) is None:
        return device_parameters(transformer, layout, rank, layers)
    return base.trainable_share * _weights(layers, rank, False), base.trainable_share * _weights(layers, rank, True)


def base_bytes(
    transformer: Transformer, layout: Layout, rank: Alike, layers: Sequence[Layer] = ()
) -> tuple[float, float]:
    """Return the bytes of a frozen base on a device of a pipeline rank: of what all tokens use, and of its experts.

    Embedding, head, norms and biases take 16 bits, whatever the base's products take. Nothing without a frozen base.
    """
    if (base := transformer.frozen_base) is None:
        return 0.0, 0.0
    layers = layers or layers_of(transformer, layout.share)
    used, routed = device_parameters(transformer, layout, rank, layers)
    saved = []
    for experts in (False, True):
        sizes = [
            [
                (WEIGHT_BYTES * i * o - base.bytes_of(i, o)) * times
                for i, o, times in product_weights(layer, experts=experts)
            ]
            for layer in layers
        ]
        saved.append(sum(slice_.dense * sum(sizes[0]) + slice_.experts * sum(sizes[1]) for slice_, _ in rank.slices))
    return WEIGHT_BYTES * used - saved[0], WEIGHT_BYTES * routed - saved[1]


def _weights(layers: Sequence[Layer], rank: Alike, experts: bool) -> float:
    """Return the weights of products on a device of a pipeline rank: of its experts, or of the rest."""
    each = [sum(i * o * times for i, o, times in product_weights(layer, experts=experts)) for layer in layers]
    return sum(slice_.dense * each[0] + slice_.experts * each[1] for slice_, _ in rank.slices)


def sharded(layout: Layout, parameters: tuple[float, float]) -> float:
    """Return a device's own share of its parameters among the data-parallel ranks that share them."""
    group = layout.data * layout.context
    return parameters[0] / group + parameters[1] / (group // layout.expert)


class AlikeBytes(NamedTuple):
    """What a device of ranks that are alike has, whatever the batch, the data-parallel ranks and ZeRO.

    `parameters` are the trained ones, `base` the bytes of a frozen base. `fp8` counts the weights held in 8 bits,
    `state` the optimizer's bytes per parameter; `kept_bytes` are those of a microbatch in one stage. `buffers` holds
    bytes of buffers by what they depend on.
    """

    alike: Alike
    parameters: tuple[float, float]
    base: tuple[float, float]
    fp8: float
    state: float
    kept_bytes: float
    buffers: dict[tuple[bool, int], float]


_HELD: dict[object, tuple[tuple[Any, ...], ...]] = {}
_MEMORIES: dict[object, tuple[AlikeBytes, ...]] = {}
_MOST = 20_000  # layouts of a few plans


def ranks_held(
    transformer: Transformer, layout: Layout
) -> tuple[tuple[Alike, tuple[float, float], tuple[float, float], float, float], ...]:
    """Return the first fields of `AlikeBytes`, which do not depend on what is recomputed."""
    share, counts = layout.share, counts_of(transformer, layout)
    place = counts, layout.schedule, layout.pipeline, layout.stages_per_rank
    key = (transformer, share._replace(recompute="none"), *place)
    known = _HELD.get(key)
    if known is None:
        if len(_HELD) >= _MOST:
            _HELD.clear()
        layers = layers_of(transformer, share)
        known = _HELD[key] = tuple(
            (
                rank,
                trained_parameters(transformer, layout, rank, layers),
                base_bytes(transformer, layout, rank, layers),
                held_fp8(transformer, layout, rank),
                state_bytes(transformer, layout, rank, layers),
            )
            for rank in alike(transformer, *place)
        )
    return known


def rank_memories(transformer: Transformer, layout: Layout) -> tuple[AlikeBytes, ...]:
    """Return the ranks of a pipeline, which layouts share that differ only in batch, data and ZeRO."""
    share, counts = layout.share, counts_of(transformer, layout)
    key = (transformer, share, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    known = _MEMORIES.get(key)
    if known is None:
        if len(_MEMORIES) >= _MOST:
            _MEMORIES.clear()
        layers = layers_of(transformer, share)
        known = _MEMORIES[key] = tuple(
            AlikeBytes(*held_rank, _kept_per_stage(layers, layout, held_rank[0]), {})
            for held_rank in ranks_held(transformer, layout)
        )
    return known


def _kept_per_stage(layers: Sequence[Layer], layout: Layout, rank: Alike) -> float:
    return _activations(layers, layout, [slice_ for slice_, _ in rank.slices]) / len(rank.slices)


def device_bytes(transformer: Transformer, layout: Layout, rank: Alike) -> Bytes:
    """Return what one device of a pipeline rank holds at its peak.

    The first rank holds the most activations: as many microbatches as the schedule runs ahead of their backwards.
    """
    layers = layers_of(transformer, layout.share)
    parameters, base = (size(transformer, layout, rank, layers) for size in (trained_parameters, base_bytes))
    fp8, state = held_fp8(transformer, layout, rank), state_bytes(transformer, layout, rank, layers)
    memory = AlikeBytes(rank, parameters, base, fp8, state, _kept_per_stage(layers, layout, rank), {})
    return Bytes(*next(_items(transformer, layout, [memory])))


def _items(transformer: Transformer, layout: Layout, memories: Iterable[AlikeBytes]) -> Iterator[tuple[float, ...]]:
    """Yield the items of `Bytes` of every kind of rank."""
    counts = layout.pipeline, layout.num_microbatches
    needs = _gathers(layout), min(counts)
    for memory in memories:
        rank, buffers = memory.alike, memory.buffers
        if needs not in buffers:
            buffers[needs] = _buffers(transformer, layout, rank, layers_of(transformer, layout.share))
        activations = pairs_held(layout.schedule, rank.first, *counts, layout.stages_per_rank) * memory.kept_bytes
        yield (*_fixed(layout, *memory[1:5]), activations, buffers[needs])


def _fixed(
    layout: Layout, parameters: tuple[float, float], base: tuple[float, float], fp8: float, state: float
) -> tuple[float, float, float]:
    """Return a device's bytes of weights, gradients and optimizer, whatever is recomputed."""
    zero = layout.zero
    whole, part = sum(parameters), sharded(layout, parameters)
    frozen = sharded(layout, base) if zero >= 3 else sum(base)
    return (
        WEIGHT_BYTES * (part if zero >= 3 else whole) + frozen + FP8_BYTES * fp8,
        layout.practice.gradient_bytes * (whole if zero < 2 or keeps_gradients(layout) else part),
        state * (part if zero >= 1 else whole),
    )


def _sum(items: tuple[float, ...]) -> float:
    """Return what `Bytes.total` says of the same items; newer Pythons round `sum` otherwise."""
    weights, gradients, optimizer, activations, buffers = items
    return weights + gradients + optimizer + activations + buffers


def _gathers(layout: Layout) -> bool:
    """Whether whole weights of layers are gathered."""
    return layout.zero >= 3 and layout.data * layout.context > 1


def state_bytes(transformer: Transformer, layout: Layout, rank: Alike, layers: Sequence[Layer] = ()) -> float:
    """Return the bytes of the optimizer's state per parameter of a device.

    Muon leaves the embedding and the head to AdamW.

    >>> gpt = Transformer("tiny", 4, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> plain = Layout(batch=1)
    >>> rank = alike(gpt, (4,), "1f1b", 1, 1)[0]
    >>> state_bytes(gpt, plain, rank)
    12.0
    """
    states = layout.practice.states
    if not states.muon:
        return states.state_bytes
    layers = layers or layers_of(transformer, layout.share)
    of_layers = sum(_weights(layers, rank, flag) for flag in (False, True))
    share = of_layers / sum(device_parameters(transformer, layout, rank, layers))
    return states.state_bytes * share + OPTIMIZER_BYTES * (1 - share)


def held_fp8(transformer: Transformer, layout: Layout, rank: Alike) -> float:
    """Return how many weights a device of a pipeline rank casts once in a step and holds in 8 bits."""
    if not (layout.practice.fp8 and layout.share.holds_fp8):
        return 0.0
    dense, experts = (fp8_weights(transformer, layout, experts=flag) for flag in (False, True))
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
    return _activations(layers_of(transformer, layout.share), layout, slices)


def _activations(layers: Sequence[Layer], layout: Layout, slices: Sequence[StageLayers]) -> float:
    counts: dict[tuple[bool, tuple[str, ...]], int] = {}
    for slice_ in slices:
        for count, experts, recomputed in slice_.parts(layout):
            counts[experts, recomputed] = counts.get((experts, recomputed), 0) + count
    return sum(count * layers[experts].kept_bytes(recomputed) for (experts, recomputed), count in counts.items())


def _buffers(transformer: Transformer, layout: Layout, rank: Alike, layers: Sequence[Layer]) -> float:
    """Return the bytes of temporary buffers.

    A message each way; one layer, or its queries, keys and values, in recomputation; the gathered keys and values of
    a layer, and their gradients; the whole weights of two layers if sharded; the 8-bit weights of a layer if
    not held; the largest weight of a quantised base in 16 bits; the embedding's mask of every microbatch in flight; the
    head's input and logits of one microbatch.
    """
    wide, has_experts = wide_of(transformer, layout), any(slice_.experts for slice_, _ in rank.slices)
    layer = layers[has_experts]
    size = 2 * WORD * wide if layout.pipeline > 1 else 0.0
    if layout.recompute.startswith("full"):
        size += layer.kept_bytes(())
    elif "projections" in recomputed_ops(layout):
        size += sum(operation.kept_bytes for operation in layer.operations if operation.name == "projections")
    if layout.context > 1 and not layout.practice.overlap_context:
        size += 2 * ring_bytes(transformer, layout)
    if _gathers(layout):
        size += 2 * WEIGHT_BYTES * max(block.parameters + block.expert_parameters for block in (layers[0], layer))
    if layout.practice.fp8 and not layout.share.holds_fp8:
        size += fp8_weights(transformer, layout, experts=has_experts)
    if transformer.frozen_base is not None and transformer.frozen_base.is_quantised:
        every = (product_weights(layers[kind], experts=flag) for kind in (0, has_experts) for flag in (False, True))
        size += WEIGHT_BYTES * max(inputs * outputs for weights in every for inputs, outputs, _ in weights)
    if transformer.dropout and any(slice_.is_first for slice_, _ in rank.slices):
        size += wide * min(layout.pipeline, layout.num_microbatches)
    if any(slice_.is_last for slice_, _ in rank.slices):
        logits = layout.practice.logit_bytes * transformer.vocabulary / layout.tensor
        size += 2 * WORD * wide + tokens_of(transformer, layout) * logits
    return size


def peak_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the bytes of the fullest device: the total of the items of `estimate`."""
    return max(map(_sum, _items(transformer, layout, rank_memories(transformer, layout))))


def fixed_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return what the device with the most weights, gradients and optimizer state holds of these.

    >>> gpt = Transformer("tiny", 4, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> plain = Layout(batch=8)
    >>> held = fullest_bytes(gpt, plain)
    >>> fixed_bytes(gpt, plain) == held.weights + held.gradients + held.optimizer
    True
    """
    every = ranks_held(transformer, layout)
    return max(sum(_fixed(layout, trained, base, fp8, state)) for _, trained, base, fp8, state in every)


def fullest_bytes(transformer: Transformer, layout: Layout) -> Bytes:
    """Return what the fullest device holds at its peak."""
    return Bytes(*max(_items(transformer, layout, rank_memories(transformer, layout)), key=_sum))
