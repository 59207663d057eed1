"""The products of a layer by their shapes, what they take, and what casting their inputs to 8 bits takes with FP8.

With FP8, the products with a layer's weights take 8-bit inputs: attention's projections, feed-forward blocks, experts.
Attention itself, the router, the embedding and the head stay in 16 bits, and so do all messages. For every number that
is cast, a kernel first reads it to find the largest one (2 bytes), then another reads it again (2) and writes it in 8
bits (1). Tensor cores want both operands along the inner sum, so what enters two products is written twice, once
transposed: inputs (forward, and the weight's gradient) and gradients of outputs (those of the input and the weight).
"""

from __future__ import annotations

from typing import NamedTuple

from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import attention_seconds, memory_seconds, product_seconds
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.transformer import Transformer

WORD = 2  # bytes of a 16-bit number
CAST_ONCE, CAST_TWICE = 5, 6  # bytes read and written to cast a number, written once or also transposed
_KERNELS = 2  # per cast: one finds the largest number, one casts


class Product(NamedTuple):
    """`times` products in parallel: tokens as rows, outputs as columns, inputs as depth; `fp8` if 8 bits suffice."""

    rows: float
    columns: float
    depth: float
    times: float = 1.0
    fp8: bool = True


def tokens_of(transformer: Transformer, layout: Layout) -> float:
    """Return how many tokens of a microbatch a device processes."""
    return layout.microbatch * transformer.sequence / layout.context


def keys_of(transformer: Transformer, layout: Layout) -> float:
    """Return the width of keys and values on one tensor-parallel rank; if there are more ranks than heads, copies."""
    each = transformer.head_width + transformer.value_width
    return each * max(transformer.num_key_value_heads / layout.tensor, 1.0)


def heads_of(transformer: Transformer, layout: Layout) -> float:
    """Return the width of queries, keys and values on one tensor-parallel rank."""
    return transformer.num_heads * transformer.head_width / layout.tensor + keys_of(transformer, layout)


def divided(transformer: Transformer, layout: Layout, parameters: float) -> float:
    """Return how many of a layer's parameters a tensor-parallel rank holds.

    >>> gpt = Transformer("tiny", 1, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> divided(gpt, Layout(batch=1, tensor=2), 100)
    50.0
    """
    whole = transformer.whole_parameters
    return (parameters - whole) / layout.tensor + whole


def attention_products(transformer: Transformer, layout: Layout) -> list[Product]:
    """Return the products of a layer's attention: queries, keys and values together, then the output.

    Latent attention projects down first. Every tensor-parallel rank does that for all tokens, with whole weights; the
    heads, and so the projections up to them and the output, are divided.
    """
    tokens, hidden = tokens_of(transformer, layout), transformer.hidden
    out = Product(tokens, hidden, transformer.num_heads * transformer.value_width / layout.tensor)
    if (latent := transformer.latent) is None:
        return [Product(tokens, heads_of(transformer, layout), hidden), out]
    down = [Product(tokens, outputs, inputs) for inputs, outputs in latent.down(hidden)]
    return [*down, *up_products(transformer, layout), out]


def up_products(transformer: Transformer, layout: Layout) -> list[Product]:
    """Return the products that project latents up to queries, keys and values of all heads."""
    latent, tokens = transformer.latent, tokens_of(transformer, layout)
    assert latent is not None, "only latents are projected up"
    heads = transformer.num_heads / layout.tensor
    return [Product(tokens, heads * each, inputs) for inputs, each in latent.up(transformer.hidden)]


def layer_products(transformer: Transformer, layout: Layout, experts: bool) -> list[Product]:
    """Return the products of a layer's forward with its weights."""
    tokens, hidden = tokens_of(transformer, layout), transformer.hidden
    products = attention_products(transformer, layout)
    if not experts or transformer.experts is None:
        return products + _feedforward(transformer, tokens, transformer.feedforward / layout.tensor, 1.0)
    found = transformer.experts
    products += routed_products(transformer, layout)
    if found.num_shared:
        products += _feedforward(transformer, tokens, found.num_shared * found.feedforward / layout.tensor, 1.0)
    return [*products, Product(tokens, found.num_experts, hidden, fp8=False)]


def routed_products(transformer: Transformer, layout: Layout) -> list[Product]:
    """Return the products of the experts that tokens are sent to; the tokens are spread evenly."""
    found = transformer.experts
    assert found is not None, "only layers with experts route"
    local = found.num_experts / layout.expert
    tokens = tokens_of(transformer, layout) * found.per_token / local
    return _feedforward(transformer, tokens, found.feedforward / layout.tensor, local)


def _feedforward(transformer: Transformer, tokens: float, width: float, times: float) -> list[Product]:
    up = (2 if transformer.gated else 1) * width
    return [Product(tokens, up, transformer.hidden, times), Product(tokens, transformer.hidden, width, times)]


def fp8_weights(transformer: Transformer, layout: Layout, *, experts: bool) -> float:
    """Return how many weights of a layer a device casts to 8 bits.

    >>> gpt = Transformer("tiny", 1, hidden=64, num_heads=4, vocabulary=10, sequence=8)
    >>> fp8_weights(gpt, Layout(batch=1, tensor=2), experts=False) == 12 * 64**2 / 2
    True
    """
    every = layer_products(transformer, layout, experts)
    return sum(one.columns * one.depth * one.times for one in every if one.fp8)


def product_times(cluster: Cluster, layout: Layout, products: list[Product]) -> tuple[float, float, float]:
    """Return the seconds of products: forward, gradients of their inputs, gradients of their weights."""
    forward = by_input = by_weight = 0.0
    for one in products:
        rows, columns, depth, times, _ = one
        fp8 = one.fp8 and layout.practice.fp8
        forward += product_seconds(cluster.device, rows, columns, depth, times, fp8=fp8)
        by_input += product_seconds(cluster.device, rows, depth, columns, times, fp8=fp8)
        by_weight += product_seconds(cluster.device, depth, columns, rows, times, fp8=fp8)
        if fp8:
            casts = _casts(cluster, layout, one)
            forward, by_input, by_weight = forward + casts[0], by_input + casts[1], by_weight + casts[2]
    return forward, by_input, by_weight


def _casts(cluster: Cluster, layout: Layout, one: Product) -> tuple[float, float, float]:
    """Return the seconds of the casts of a product in its three passes.

    What software does not keep in 8 bits is cast for every pass that needs it.
    """
    practice = layout.practice
    inputs, weights = one.rows * one.depth * one.times, one.depth * one.columns * one.times
    forward = cast_seconds(cluster, inputs, CAST_TWICE if practice.keeps_fp8_inputs else CAST_ONCE)
    by_input = cast_seconds(cluster, one.rows * one.columns * one.times, CAST_TWICE)
    by_weight = 0.0 if practice.keeps_fp8_inputs else cast_seconds(cluster, inputs, CAST_ONCE)
    if practice.keeps_fp8_weights:
        return forward, by_input, by_weight
    again = cast_seconds(cluster, weights, CAST_ONCE)
    return forward + again, by_input + again, by_weight


def cast_seconds(cluster: Cluster, count: float, size: int = CAST_TWICE) -> float:
    """Return the seconds to cast so many numbers; `size` is what is read and written for each."""
    return memory_seconds(cluster.device, size * count) + _KERNELS * cluster.device.reach.launch_seconds


def attention_times(transformer: Transformer, cluster: Cluster, layout: Layout) -> tuple[float, float]:
    """Return the seconds of attention itself, forward and backward.

    Scores are sums over the width of keys, outputs over that of values. Fused, backward computes the scores again, the
    gradients of queries and keys (three products as wide as keys), of scores and values (two as wide as values).
    """
    device = cluster.device
    heads = layout.microbatch * transformer.num_heads / layout.tensor
    pieces = 1 if layout.context == 1 else 2  # the first and the last of a sequence, so that all ranks do as much
    rows, columns = transformer.sequence / layout.context, transformer.sequence
    keys, wide = transformer.head_width, transformer.value_width
    if layout.practice.flash_attention:
        flops = 2.0 * heads * rows * columns * (keys + wide) / 2
        back = (3 * keys + 2 * wide) / (keys + wide) * flops
        more = (pieces - 1) * device.reach.launch_seconds
        return attention_seconds(device, flops) + more, attention_seconds(device, back) + more
    scores = product_seconds(device, rows, columns, keys, heads)
    values = product_seconds(device, rows, wide, columns, heads)
    size = WORD * heads * rows * columns
    masked = 2.5 if transformer.dropout else 0.0
    forward = scores + values + memory_seconds(device, (2 + masked) * size)
    return forward, 2 * (scores + values) + memory_seconds(device, (3 + masked) * size)
