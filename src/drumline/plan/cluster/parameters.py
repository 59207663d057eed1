"""How many parameters the parts of a transformer have, and how many operations a step takes with them."""

from __future__ import annotations

from drumline.plan.cluster.transformer import Transformer


def attention_parameters(transformer: Transformer) -> int:
    """Return the parameters of a layer's attention, its normalisation included."""
    width = transformer.num_heads * transformer.head_width
    keys = 2 * transformer.num_key_value_heads * transformer.head_width
    biases = width + keys + transformer.hidden if transformer.biased else 0
    return transformer.hidden * (2 * width + keys) + biases + _norm(transformer)


def feedforward_parameters(transformer: Transformer, width: int) -> int:
    """Return the parameters of a feed-forward block of this inner width, without its normalisation."""
    biases = width + transformer.hidden if transformer.biased else 0
    return (3 if transformer.gated else 2) * transformer.hidden * width + biases


def dense_layer_parameters(transformer: Transformer) -> int:
    """Return the parameters of a layer without experts.

    >>> dense_layer_parameters(Transformer("gpt", 1, hidden=64, num_heads=4, vocabulary=10, sequence=8))
    49984
    """
    return (
        attention_parameters(transformer)
        + feedforward_parameters(transformer, transformer.feedforward)
        + _norm(transformer)
    )


def shared_parameters(transformer: Transformer) -> int:
    """Return what of a layer with experts every token uses: attention, the router, and the shared experts."""
    experts = transformer.experts
    assert experts is not None, "a transformer without experts"
    return (
        attention_parameters(transformer)
        + _norm(transformer)
        + transformer.hidden * experts.num_experts
        + experts.num_shared * feedforward_parameters(transformer, experts.feedforward)
    )


def expert_parameters(transformer: Transformer) -> int:
    """Return the parameters of one expert, or 0."""
    return feedforward_parameters(transformer, transformer.experts.feedforward) if transformer.experts else 0


def embedding_parameters(transformer: Transformer) -> int:
    """Return the parameters before the first layer."""
    return transformer.hidden * (
        transformer.vocabulary + (transformer.sequence if transformer.learned_positions else 0)
    )


def head_parameters(transformer: Transformer) -> int:
    """Return the parameters after the last layer; the table of a tied one counts here only where it is a copy."""
    return transformer.hidden * transformer.vocabulary + _norm(transformer)


def _norm(transformer: Transformer) -> int:
    return (2 if transformer.biased else 1) * transformer.hidden


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
