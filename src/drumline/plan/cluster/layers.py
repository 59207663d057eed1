"""What one microbatch takes in one layer, in the embedding and in the head, on one device of a layout.

A layer is products, passes over memory, and messages. With t tensor-parallel ranks each product's weight is cut in t, along its
columns or its rows in turn, so that only the layer's two blocks end with an exchange:

    norm │ qkv (columns) │ attention │ out (rows) │ exchange, dropout, add │ norm │ up (columns) │ gelu │ down (rows) │ exchange ...

Without sequence parallelism the exchange is an all-reduce, and what is right of it is done by every rank for all tokens. With it,
the exchange is a reduce-scatter there and an all-gather before the next product: as many bytes, but norms, dropouts and sums
are divided by t as well.
"""

from __future__ import annotations

from functools import lru_cache

from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import (
    REACH,
    attention_seconds,
    gather_seconds,
    memory_seconds,
    product_seconds,
    reduce_seconds,
)
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.parameters import dense_layer_parameters, expert_parameters, shared_parameters
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.cluster.work import Ops, Work

Product = tuple[float, float, float]  # rows: tokens; columns: what comes out; depth: what goes in

WORD = 2  # bytes of a 16-bit number
ADD_BYTES = 10  # to add a gradient of 16 bits to a sum of 32: read both, write the sum
LOSS_BYTES = 50  # passes over the logits in 32 bits: cast, maximum, difference, exponential, sum, quotient, and back


def layer_ops(transformer: Transformer, cluster: Cluster, layout: Layout, *, experts: bool = False) -> Ops:
    """Return what a microbatch takes in one layer."""
    return _layer(transformer, cluster, *_key(layout), experts)


def embedding_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> Ops:
    """Return what a microbatch takes before the first layer: rows are read, summed over the ranks that have them."""
    tokens = tokens_of(transformer, layout)
    size = WORD * tokens * transformer.hidden
    exchange = Work(tensor=_exchange(cluster, layout, size))
    passes = Work(memory_seconds(cluster.device, 3 * size) + 3 * REACH.launch_seconds)
    return Ops(passes + exchange, Work(), Work(), passes)


def head_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> Ops:
    """Return what a microbatch takes after the last layer: a product with the vocabulary, and the loss."""
    tokens = tokens_of(transformer, layout)
    part = transformer.vocabulary / layout.tensor
    size = WORD * tokens * transformer.hidden
    device = cluster.device
    forward, by_input, by_weight = _products(cluster, [(tokens, part, transformer.hidden)])
    loss = memory_seconds(device, LOSS_BYTES * tokens * part)
    add = 0.0 if layout.practice.fused_accumulation else memory_seconds(device, ADD_BYTES * part * transformer.hidden)
    exchange = _exchange(cluster, layout, size)
    gather = gather_seconds(cluster.link(layout.tensor, 1), layout.tensor, size) if layout.sequence_parallel else 0.0
    hidden = min(exchange, by_weight) if layout.practice.overlap_tensor else 0.0
    return Ops(
        Work(forward + loss / 2, tensor=gather),
        Work(),
        Work(by_input + loss / 2, tensor=exchange - hidden),
        Work(by_weight + add),
    )


def tokens_of(transformer: Transformer, layout: Layout) -> float:
    """Return how many tokens of a microbatch a device has."""
    return layout.microbatch * transformer.sequence / layout.context


def _key(layout: Layout) -> tuple[Layout]:
    """Return the layout with everything at its default that no layer depends on, so that many layouts share a result."""
    return (
        Layout(
            layout.microbatch,
            layout.microbatch,
            layout.tensor,
            1,
            layout.data * layout.context if layout.expert > 1 else 1,
            layout.context,
            layout.expert,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute,
            practice=layout.practice,
        ),
    )


@lru_cache(maxsize=4096)
def _layer(transformer: Transformer, cluster: Cluster, layout: Layout, experts: bool) -> Ops:
    device, practice, ranks = cluster.device, layout.practice, layout.tensor
    tokens = tokens_of(transformer, layout)
    whole = WORD * tokens * transformer.hidden
    width = transformer.num_heads * transformer.head_width / ranks
    keys = 2 * transformer.num_key_value_heads * transformer.head_width / ranks
    products: list[Product] = [(tokens, width + keys, transformer.hidden), (tokens, transformer.hidden, width)]
    inner = 0.0  # how many numbers per token the inner width of the feed-forward blocks has here
    if experts:
        found = transformer.experts
        assert found is not None
        local = found.num_experts / layout.expert
        each = tokens * found.per_token / local
        products += _feedforward(transformer, each, found.feedforward / ranks) * max(round(local), 1)
        products += _feedforward(transformer, tokens, found.feedforward / ranks) * found.num_shared
        products.append((tokens, found.num_experts, transformer.hidden))
        inner = (found.per_token + found.num_shared) * found.feedforward / ranks
    else:
        products += _feedforward(transformer, tokens, transformer.feedforward / ranks)
        inner = transformer.feedforward / ranks
    forward, by_input, by_weight = _products(cluster, products)

    # Passes over memory, as numbers per token: those that tensor parallelism divides, and those that only sequence
    # parallelism does: two norms, two sums with the residual, and where there is dropout its masks of one byte.
    masks = 2 * 0.5 if transformer.dropout else 0.0
    along = ranks if layout.sequence_parallel else 1
    kinds = 3 if transformer.gated else 2
    routed = 2 * transformer.experts.per_token * transformer.hidden if experts and transformer.experts else 0.0
    passes = (10 + masks) * transformer.hidden / along + 2 * (width + keys) + kinds * inner + routed
    passes_back = (12 + masks) * transformer.hidden / along + 2 * (width + keys) + (kinds + 1) * inner + routed
    launches = 12 * REACH.launch_seconds
    elementwise = memory_seconds(device, WORD * tokens * passes) + launches
    elementwise_back = memory_seconds(device, WORD * tokens * passes_back) + launches

    attend, attend_back, attend_again = _attention(transformer, cluster, layout)
    context, context_back = _ring(transformer, cluster, layout, attend, attend_back)
    scatter, scatter_back = _routing(transformer, cluster, layout) if experts else (0.0, 0.0)
    exchange = _exchange(cluster, layout, whole)
    gather = exchange / 2
    again_gather = gather if layout.sequence_parallel else 0.0  # of the block's input, for the weights' gradients
    once = Work(forward + elementwise + attend, 2 * exchange, context, scatter)
    if practice.overlap_tensor:
        # The exchange of an input's gradient hides behind the weight's product. With sequence parallelism the gather
        # that backward begins with cannot hide, and that of the stored input hides behind the input's gradient.
        ahead = 2 * gather if layout.sequence_parallel else 0.0
        hideable = 2 * (exchange - gather) + 2 * again_gather if layout.sequence_parallel else 2 * exchange
        tensor_back = ahead + max(hideable - by_weight, 0.0)
    else:
        tensor_back = 2 * exchange + 2 * again_gather
    again = Work()
    if layout.recompute == "full":
        again = once
    elif layout.recompute == "selective" and not practice.flash_attention:
        again = Work(attend_again)
    add = 0.0
    if not practice.fused_accumulation:
        numbers = dense_layer_parameters(transformer) / ranks
        if experts and transformer.experts:
            part = transformer.experts.num_experts / layout.expert * expert_parameters(transformer)
            numbers = (shared_parameters(transformer) + part) / ranks
        add = memory_seconds(device, ADD_BYTES * numbers)
    return Ops(
        once,
        again,
        Work(by_input + elementwise_back + attend_back, tensor_back, context_back, scatter_back),
        Work(by_weight + add),
    )


def _feedforward(transformer: Transformer, tokens: float, width: float) -> list[Product]:
    up = (2 if transformer.gated else 1) * width
    return [(tokens, up, transformer.hidden), (tokens, transformer.hidden, width)]


def _products(cluster: Cluster, products: list[Product]) -> tuple[float, float, float]:
    """Return the seconds of products forward, of their inputs' gradients, and of their weights' gradients."""
    forward = by_input = by_weight = 0.0
    for rows, columns, depth in products:
        forward += product_seconds(cluster.device, rows, columns, depth)
        by_input += product_seconds(cluster.device, rows, depth, columns)
        by_weight += product_seconds(cluster.device, depth, columns, rows)
    return forward, by_input, by_weight


def _attention(transformer: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, float, float]:
    """Return the seconds of attention itself: forward, backward, and when it is computed again."""
    device = cluster.device
    heads = layout.microbatch * transformer.num_heads / layout.tensor
    rows, columns, width = transformer.sequence / layout.context, transformer.sequence, transformer.head_width
    if layout.practice.flash_attention:
        flops = 4.0 * heads * rows * columns * width / 2
        return attention_seconds(device, flops), attention_seconds(device, 2.5 * flops), 0.0
    scores = product_seconds(device, rows, columns, width, heads)
    values = product_seconds(device, rows, width, columns, heads)
    size = WORD * heads * rows * columns
    mask = 2.5 if transformer.dropout else 0.0
    forward = scores + values + memory_seconds(device, (2 + mask) * size)
    backward = 2 * (scores + values) + memory_seconds(device, (3 + mask) * size)
    return forward, backward, forward


def _ring(
    transformer: Transformer, cluster: Cluster, layout: Layout, attend: float, attend_back: float
) -> tuple[float, float]:
    """Return what attention does not hide of keys and values that go round the context-parallel ranks."""
    if layout.context == 1:
        return 0.0, 0.0
    link = cluster.link(layout.context, layout.tensor)
    seconds = gather_seconds(link, layout.context, ring_bytes(transformer, layout))
    return max(seconds - attend, 0.0), max(2 * seconds - attend_back, 0.0)


def ring_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return the keys and values of a microbatch's whole sequences, as one tensor-parallel rank has them."""
    keys = 2 * transformer.num_key_value_heads * transformer.head_width / layout.tensor
    return WORD * layout.microbatch * transformer.sequence * keys


def _routing(transformer: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return what it takes to send tokens to their experts and back, forward and backward."""
    if layout.expert == 1:
        return 0.0, 0.0
    link = cluster.link(layout.expert, layout.tensor)
    there = link.latency_seconds * (layout.expert - 1) + routed_bytes(transformer, layout) / link.bytes_per_second
    return 2 * there, 2 * there


def routed_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return what a device sends to experts elsewhere, for one layer and one way."""
    assert transformer.experts is not None
    away = (layout.expert - 1) / layout.expert
    part = layout.tensor if layout.sequence_parallel else 1
    tokens = tokens_of(transformer, layout) * transformer.experts.per_token
    return WORD * tokens * transformer.hidden * away / part


def _exchange(cluster: Cluster, layout: Layout, size: float) -> float:
    """Return an all-reduce among tensor-parallel ranks, or a reduce-scatter and an all-gather: they take the same."""
    return reduce_seconds(cluster.link(layout.tensor, 1), layout.tensor, size)
