"""Operations of a step: the model's own."""

from __future__ import annotations

from drumline.plan.cluster.model.transformer import Transformer


def model_flops(transformer: Transformer, batch: int, *, causal: bool = False) -> float:
    """Return the operations of a step: two for each weight and token forward, twice as many backward, and attention.

    Attention counts as if every token looked at every other, as most papers count it; `causal` counts the half that is
    not masked.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> h, l, s, v = 12288, 96, 2048, 51200
    >>> round(model_flops(gpt, 1) / (72 * s * l * h**2 * (1 + s / 6 / h + v / 12 / l / h)), 6)
    1.0
    """
    attention = attention_flops(transformer, batch) / (2 if causal else 1)
    tokens = batch * transformer.sequence
    return 3 * (attention + 2.0 * tokens * (layer_weights(transformer) + transformer.hidden * transformer.vocabulary))


def attention_flops(transformer: Transformer, batch: int) -> float:
    """Return the operations of attention itself in one forward: scores, and their products with the values."""
    width = transformer.num_heads * transformer.head_width
    return 4.0 * batch * transformer.sequence**2 * width * transformer.num_layers


def layer_weights(transformer: Transformer) -> float:
    """Return the weights of all layers that a token is multiplied with."""
    width = transformer.num_heads * transformer.head_width
    keys = 2 * transformer.num_key_value_heads * transformer.head_width
    inner = float(transformer.num_dense_layers * transformer.feedforward)
    if (experts := transformer.experts) is not None:
        each = (experts.per_token + experts.num_shared) * experts.feedforward
        inner += (transformer.num_layers - transformer.num_dense_layers) * each
    kinds = 3 if transformer.gated else 2
    return transformer.hidden * (transformer.num_layers * (2.0 * width + keys) + kinds * inner)
