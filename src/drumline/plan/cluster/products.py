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
from drumline.plan.cluster.kernels import memory_seconds, product_seconds
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
    return 2 * transformer.head_width * max(transformer.num_key_value_heads / layout.tensor, 1.0)


def layer_products(transformer: Transformer, layout: Layout, experts: bool) -> list[Product]:
    """Return the products of a layer's forward with its weights."""
    tokens, hidden = tokens_of(transformer, layout), transformer.hidden
    width = transformer.num_heads * transformer.head_width / layout.tensor
    products = [Product(tokens, width + keys_of(transformer, layout), hidden), Product(tokens, hidden, width)]
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
