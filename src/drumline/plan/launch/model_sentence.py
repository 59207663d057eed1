"""A transformer in one sentence, for frameworks whose models are chosen and not described."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.plan.cluster.transformer import Transformer


def described(transformer: Transformer) -> str:
    """Return all that tells a transformer from others.

    >>> described(Transformer("tiny", 4, 64, 4, vocabulary=1000, sequence=128))
    '4 layers of width 64, 4 heads of 16, feed-forward 256, vocabulary 1000, learned positions, biases, dropout, tied'
    """
    return ", ".join(_phrases(transformer))


def _phrases(transformer: Transformer) -> Iterator[str]:
    yield f"{transformer.num_layers} layers of width {transformer.hidden}"
    details, shared = transformer.details, transformer.num_key_value_heads
    if details.latent is not None:
        yield f"{transformer.num_heads} heads with {details.latent}"
    else:
        keys = f" on {shared} of keys and values" if shared != transformer.num_heads else ""
        yield f"{transformer.num_heads} heads of {transformer.head_width}{keys}"
    if details.qk_norm:
        yield "norms of queries and keys"
    if details.qkv_bias:
        yield "biases of queries, keys and values"
    yield f"{'gated ' if transformer.gated else ''}feed-forward {transformer.feedforward}"
    yield from _experts(transformer)
    yield f"vocabulary {transformer.vocabulary}"
    yield _positions(transformer)
    if transformer.biased:
        yield "biases"
    if transformer.dropout:
        yield "dropout"
    yield "tied" if transformer.tied else "not tied"
    yield from details.others


def _experts(transformer: Transformer) -> Iterator[str]:
    experts = transformer.experts
    if experts is not None:
        shared = f" and {experts.num_shared} shared" if experts.num_shared else ""
        yield f"{experts.per_token} of {experts.num_experts} experts of {experts.feedforward}{shared}"
        if transformer.num_dense_layers:
            yield f"the first {transformer.num_dense_layers} layers without experts"


def _positions(transformer: Transformer) -> str:
    if transformer.details.alibi:
        return "ALiBi positions"
    if transformer.learned_positions:
        return "learned positions"
    base = transformer.details.rotary_base
    return f"rotary positions of base {base:.0f}" if base else "rotary positions"
