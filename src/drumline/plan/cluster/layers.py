"""What one microbatch costs in one layer, in the embedding and in the head, on one device of a layout.

A layer consists of products, passes over memory, and messages. With t tensor-parallel ranks, each product's weight is
divided by t, alternately along its columns and its rows, so that only the layer's two blocks end with an exchange:

    norm │ qkv (columns) │ attention │ out (rows) │ exchange │ dropout, sum
    norm │ up (columns)  │ gelu      │ down (rows) │ exchange │ dropout, sum

Without sequence parallelism the exchange is an all-reduce, and every rank does the work on both sides of the divided
products for all tokens. With it, the exchange is a reduce-scatter there and an all-gather before the next product: the
same number of bytes, but norms, dropouts and sums are also divided by t.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import (
    Ops,
    Spent,
    exposed,
    gather_seconds,
    memory_seconds,
    reduce_seconds,
)
from drumline.plan.cluster.layout import Layout, casts_once, recomputed_ops
from drumline.plan.cluster.products import (
    WORD,
    Product,
    attention_times,
    cast_seconds,
    divided,
    heads_of,
    keys_of,
    layer_products,
    product_times,
    routed_products,
    tokens_of,
    up_products,
)
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import find

NUM_LAUNCHES = 12  # kernels that pass over memory, per layer and direction


def layer_ops(
    transformer: Transformer, cluster: Cluster, layout: Layout, *, experts: bool = False, recompute: str = ""
) -> Ops:
    """Return the seconds of a microbatch in one layer, which may `recompute` otherwise than the layout says."""
    return _layer(transformer, cluster, relevant(layout, recompute), experts)


def embedding_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> Ops:
    """Return the seconds of a microbatch before the first layer: reading rows, and summing them over ranks."""
    size = WORD * tokens_of(transformer, layout) * transformer.hidden
    exchange = _exchange(cluster, layout, size) / (2 if layout.sequence_parallel else 1)
    passes = Spent(memory_seconds(cluster.device, 3 * size) + 3 * cluster.device.reach.launch_seconds)
    return Ops(passes + Spent(tensor=exchange), Spent(), Spent(), passes)


def head_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> Ops:
    """Return the seconds of a microbatch after the last layer: a product with the vocabulary, and the loss."""
    device = cluster.device
    tokens = tokens_of(transformer, layout)
    part = transformer.vocabulary / layout.tensor
    table = Product(tokens, part, transformer.hidden, fp8=False)
    forward, by_input, by_weight = product_times(cluster, layout, [table])
    loss = memory_seconds(device, layout.practice.loss_bytes * tokens * part)
    add = memory_seconds(device, layout.practice.accumulation_bytes * part * transformer.hidden)
    exchange = _exchange(cluster, layout, WORD * tokens * transformer.hidden)
    hidden = by_weight if relevant(layout).practice.overlap_tensor else 0.0
    return Ops(
        Spent(forward + loss / 2, tensor=exchange / 2 if layout.sequence_parallel else 0.0),
        Spent(),
        Spent(by_input + loss / 2, tensor=exposed(exchange, hidden)),
        Spent(by_weight + add),
    )


def relevant(layout: Layout, recompute: str = "") -> Layout:
    """Return the layout with defaults for everything that no layer depends on, so that many layouts share a result.

    A schedule that splits backwards matters in one way: weight gradients run later, and hide no messages. ZeRO 3
    matters with FP8: gathered weights are cast for every pass.
    """
    practice = layout.practice
    if practice.fp8 and practice.keeps_fp8_weights and not casts_once(layout):
        practice = replace(practice, keeps_fp8_weights=False)
    if practice.overlap_tensor and find(layout.schedule).splits_backward:
        practice = replace(practice, overlap_tensor=False)
    return Layout(
        layout.microbatch,
        layout.microbatch,
        layout.tensor,
        context=layout.context,
        expert=layout.expert,
        sequence_parallel=layout.sequence_parallel,
        recompute=recompute or layout.recompute,
        practice=practice,
    )


@lru_cache(maxsize=4096)
def _layer(transformer: Transformer, cluster: Cluster, layout: Layout, experts: bool) -> Ops:
    device, practice = cluster.device, layout.practice
    forward, by_input, by_weight = product_times(cluster, layout, layer_products(transformer, layout, experts))
    passes, passes_back = _passes(transformer, cluster, layout, experts)
    attend, attend_back = attention_times(transformer, cluster, layout)
    context, context_back = _ring(transformer, cluster, layout, attend, attend_back)
    routing = _routing(transformer, cluster, layout) if experts else 0.0
    exchange = _exchange(cluster, layout, WORD * tokens_of(transformer, layout) * transformer.hidden)
    ahead = forward + passes + attend
    sent = exposed(2 * exchange, forward) if practice.overlap_forward else 2 * exchange
    once = Spent(ahead, sent, context, _beside(layout, routing, ahead))
    add = memory_seconds(device, practice.accumulation_bytes * _parameters(transformer, layout, experts))
    tensor_back = _exchange_back(layout, exchange, by_weight)
    behind = by_input + passes_back + attend_back
    back = Spent(behind, tensor_back, context_back, _beside(layout, routing, behind))
    floor = host_floor(layout)
    hosted = _at_least(once, floor)
    again = Spent()
    if layout.recompute == "full":
        again = hosted
    else:
        for op in recomputed_ops(layout):
            again = again + _again(transformer, cluster, layout, experts, op, Spent(attend, context=context))
    return Ops(hosted, again, _at_least(back, floor), _at_least(Spent(by_weight + add), floor))


def _beside(layout: Layout, routing: float, compute: float) -> float:
    """Return what tokens on their way to experts and back cost beside as much compute of another microbatch."""
    return exposed(routing, compute) if layout.practice.overlap_experts else routing


def host_floor(layout: Layout) -> float:
    """Return the least seconds of a pass through a layer: what the slowest host takes to issue its kernels.

    >>> from drumline.plan.cluster.layout import Practice
    >>> practice = Practice(host_seconds=0.5, host_meets=0.125)
    >>> [host_floor(Layout(batch=8, tensor=ranks, practice=practice)) for ranks in (1, 2, 8)]
    [0.5, 0.5625, 0.9375]
    """
    return layout.practice.host_seconds * (1 + layout.practice.host_meets * (layout.tensor - 1))


def _at_least(spent: Spent, floor: float) -> Spent:
    """Return a pass that lasts at least as long as the host takes to issue it."""
    return spent + Spent(max(floor - spent.total, 0.0))


def _again(
    transformer: Transformer, cluster: Cluster, layout: Layout, experts: bool, op: str, attention: Spent
) -> Spent:
    """Return the seconds to compute one kind of operation of a layer once more."""
    if op == "attention":
        return attention + _cast_again(transformer, cluster, layout, experts, op)
    tokens = tokens_of(transformer, layout)
    if op == "projections":
        seconds, _, _ = product_times(cluster, layout, up_products(transformer, layout))
        rearranged = memory_seconds(cluster.device, WORD * tokens * 2 * heads_of(transformer, layout))
        return Spent(seconds + rearranged + 2 * cluster.device.reach.launch_seconds)
    if op == "experts":
        if not experts or transformer.experts is None:
            return Spent()
        seconds, _, _ = product_times(cluster, layout, routed_products(transformer, layout))
        return Spent(seconds, expert=_routing(transformer, cluster, layout))
    along = layout.tensor if layout.sequence_parallel else 1
    width = 4 * transformer.hidden / along + 2 * _narrow(transformer)  # two norms and the latents', read and written
    if op == "activation":
        width = (3 if transformer.gated else 2) * inner_of(transformer, layout, experts)
    passes = Spent(memory_seconds(cluster.device, WORD * tokens * width) + 2 * cluster.device.reach.launch_seconds)
    return passes + _cast_again(transformer, cluster, layout, experts, op)


def _cast_again(transformer: Transformer, cluster: Cluster, layout: Layout, experts: bool, op: str) -> Spent:
    """Return the seconds to cast what was computed again, if it would otherwise be kept in 8 bits."""
    if not (layout.practice.fp8 and layout.practice.keeps_fp8_inputs):
        return Spent()
    widths = {
        "norms": 2.0 * transformer.hidden + _narrow(transformer),  # the inputs of both blocks, and of the heads
        "activation": inner_of(transformer, layout, experts),
        "attention": transformer.num_heads * transformer.value_width / layout.tensor,
    }
    return Spent(cast_seconds(cluster, tokens_of(transformer, layout) * widths[op]))


def _narrow(transformer: Transformer) -> int:
    """Return the width of the latents, which every tensor-parallel rank has whole; 0 without latent attention."""
    return transformer.latent.narrow if transformer.latent else 0


def inner_of(transformer: Transformer, layout: Layout, experts: bool) -> float:
    """Return the feed-forward width that a token uses on one tensor-parallel rank."""
    if experts and (found := transformer.experts) is not None:
        return (found.per_token + found.num_shared) * found.feedforward / layout.tensor
    return transformer.feedforward / layout.tensor


def _passes(transformer: Transformer, cluster: Cluster, layout: Layout, experts: bool) -> tuple[float, float]:
    """Return the seconds of passes over memory outside attention, forward and backward.

    Between the blocks are two norms (read, write; backward reads two and writes one) and two sums with the residual
    (two reads, a write), with a mask of half a number if there is dropout. Inside, queries, keys and values are
    rearranged, and the activation runs. Latents have norms of their own. A token is copied for every expert it goes to.
    """
    masks = 1.0 if transformer.dropout else 0.0
    along = layout.tensor if layout.sequence_parallel else 1
    heads, narrow = heads_of(transformer, layout), _narrow(transformer)
    inner, copies = inner_of(transformer, layout, experts), 0.0
    if experts and (found := transformer.experts) is not None:
        copies = 2.0 * found.per_token * transformer.hidden / along
    reads = 2 if transformer.gated else 1
    forward = (10 + masks) * transformer.hidden / along + 2 * heads + (reads + 1) * inner + copies + 2 * narrow
    backward = (12 + masks) * transformer.hidden / along + 2 * heads + (2 * reads + 1) * inner + copies + 3 * narrow
    size = WORD * tokens_of(transformer, layout)
    launches = NUM_LAUNCHES * cluster.device.reach.launch_seconds
    return (
        memory_seconds(cluster.device, size * forward) + launches,
        memory_seconds(cluster.device, size * backward) + launches,
    )


def _ring(
    transformer: Transformer, cluster: Cluster, layout: Layout, attend: float, attend_back: float
) -> tuple[float, float]:
    """Return the seconds of keys and values that attention does not hide, forward and backward.

    Forward gathers them from all context-parallel ranks. Backward gathers them again, and sums and scatters their
    gradients. In a ring they travel behind attention; otherwise attention waits, as in Llama 3 (arXiv 2407.21783).
    Latent attention sends keys and values of all heads, as frameworks do, not the latents.
    """
    if layout.context == 1:
        return 0.0, 0.0
    link = cluster.link(layout.context, layout.tensor)
    seconds = gather_seconds(link, layout.context, ring_bytes(transformer, layout))
    if layout.practice.overlap_context:
        return exposed(seconds, attend), exposed(2 * seconds, attend_back)
    seconds += layout.practice.meet_seconds
    return seconds, 2 * seconds


def ring_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the bytes of keys and values of a microbatch's whole sequences, on one tensor-parallel rank."""
    return WORD * layout.microbatch * transformer.sequence * keys_of(transformer, layout)


def _routing(transformer: Transformer, cluster: Cluster, layout: Layout) -> float:
    """Return the seconds to send tokens to their experts and back."""
    if layout.expert == 1:
        return 0.0
    link = cluster.link(layout.expert, layout.tensor)
    there = link.latency_seconds * (layout.expert - 1) + routed_bytes(transformer, layout) / link.bytes_per_second
    return 2 * there


def routed_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the bytes that a device sends to experts elsewhere, for one layer and direction."""
    if transformer.experts is None:
        return 0.0
    away = (layout.expert - 1) / layout.expert
    part = layout.tensor if layout.sequence_parallel else 1
    tokens = tokens_of(transformer, layout) * transformer.experts.per_token
    return WORD * tokens * transformer.hidden * away / part


def _exchange(cluster: Cluster, layout: Layout, size: float) -> float:
    """Return the seconds of an all-reduce among tensor-parallel ranks; reduce-scatter plus all-gather take the same."""
    seconds = reduce_seconds(cluster.link(layout.tensor, 1), layout.tensor, size)
    return seconds + layout.practice.meet_seconds if layout.tensor > 1 else seconds


def _exchange_back(layout: Layout, exchange: float, by_weight: float) -> float:
    """Return the part of a layer's backward exchanges that the weight gradients do not hide.

    Each of the two blocks exchanges the gradient of its input. Nothing else in the block waits for it, so it can be
    hidden. With sequence parallelism a block also begins with a gather that cannot be hidden, and gathers its stored
    input, which can.
    """
    waited = exposed(2 * exchange, by_weight if layout.practice.overlap_tensor else 0.0)
    return waited + exchange if layout.sequence_parallel else waited


def _parameters(transformer: Transformer, layout: Layout, experts: bool) -> float:
    """Return how many parameters of a layer a device holds."""
    if not experts or transformer.experts is None:
        return divided(transformer, layout, transformer.dense_layer_parameters)
    local = transformer.experts.num_experts / layout.expert * transformer.expert_parameters
    return divided(transformer, layout, transformer.shared_parameters + local)
