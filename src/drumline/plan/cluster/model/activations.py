"""What a layer keeps of a microbatch until its backward.

These are the formulas of arXiv 2205.05198, written out by what is kept, so that other models follow: per token and
layer a device keeps, in bytes, with h the hidden width, t tensor-parallel ranks, a heads and s the sequence,

    10h + 24h/t + 5as/t        every rank keeps the whole of what is between the blocks, and its part of what is inside
    34h/t + 5as/t              with sequence parallelism also of that only its part
    34h/t                      with the scores (5as/t) computed again, or never stored
    2h                         with everything computed again: a layer's input
"""

from __future__ import annotations

from drumline.plan.cluster.layers import keys_of, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.model.transformer import Transformer


def activation_bytes(transformer: Transformer, layout: Layout, *, experts: bool = False) -> float:
    """Return what a device keeps of one microbatch in one layer until its backward.

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
    """Return the bytes per token between a layer's blocks: inputs of norms and of products, and dropout's masks."""
    return (8.0 + (2.0 if transformer.dropout else 0.0)) * transformer.hidden


def inside(transformer: Transformer, layout: Layout, experts: bool) -> float:
    """Return the bytes per token inside of a layer's blocks, on all tensor-parallel ranks together."""
    width = transformer.num_heads * transformer.head_width
    size = 2.0 * (width + keys_of(transformer, layout) * layout.tensor) + 2.0 * width
    if layout.practice.flash_attention:
        size += 4.0 * transformer.num_heads  # a sum of exponentials per row, in 32 bits
    elif layout.recompute == "none":
        size += (5.0 if transformer.dropout else 2.0) * transformer.num_heads * transformer.sequence
    each = 6.0 if transformer.gated else 4.0
    if experts and (found := transformer.experts) is not None:
        copies = 2.0 * found.per_token * transformer.hidden
        return size + copies + each * (found.per_token + found.num_shared) * found.feedforward
    return size + each * transformer.feedforward
