"""Named transformers, from published runs and open models."""

from __future__ import annotations

from functools import partial

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.transformer import Details, ExpertShape, LatentAttention, Transformer

_EARLY = Details(norm="LayerNorm")


def _gpt(name: str, num_layers: int, hidden: int, num_heads: int, vocabulary: int = 51200) -> Transformer:
    return Transformer(name, num_layers, hidden, num_heads, vocabulary, sequence=2048, details=_EARLY)


_modern = partial(Transformer, gated=True, tied=False, learned_positions=False, biased=False, dropout=False)


def _llama(name: str, num_layers: int, hidden: int, num_heads: int, feedforward: int) -> Transformer:
    details = Details(rotary_base=500000.0, norm="RMSNorm", norm_epsilon=1e-5)
    return _modern(name, num_layers, hidden, num_heads, 128256, 8192, 8, feedforward, details=details)


MODELS = {
    transformer.name: transformer
    for transformer in (
        # Table 1 of Megatron-LM's SC'21 paper.
        _gpt("gpt-1.7b", 24, 2304, 24),
        _gpt("gpt-3.6b", 30, 3072, 32),
        _gpt("gpt-7.5b", 36, 4096, 32),
        _gpt("gpt-18.4b", 40, 6144, 48),
        _gpt("gpt-39.1b", 48, 8192, 64),
        _gpt("gpt-76.1b", 60, 10240, 80),
        _gpt("gpt-145.6b", 80, 12288, 96),
        _gpt("gpt-310.1b", 96, 16384, 128),
        _gpt("gpt-529.6b", 105, 20480, 128),
        _gpt("gpt-1008b", 128, 25600, 160),
        # arXiv 2205.05198; its 530B is the row above, and so is MT-NLG.
        _gpt("gpt-22b", 48, 6144, 64),
        _gpt("gpt-175b", 96, 12288, 96),
        _gpt("gpt-530b", 105, 20480, 128),
        _gpt("gpt-1t", 128, 25600, 160),
        _gpt("mt-nlg-530b", 105, 20480, 128, 50304),
        Transformer(
            "bloom-176b",
            70,
            14336,
            112,
            250880,
            sequence=2048,
            learned_positions=False,
            details=Details(alibi=True, norm="LayerNorm", others=("a norm after the embedding",)),
        ),
        _llama("llama-3-8b", 32, 4096, 32, 14336),
        _llama("llama-3-70b", 80, 8192, 64, 28672),
        _llama("llama-3-405b", 126, 16384, 128, 53248),
        _modern(
            "mixtral-8x7b",
            32,
            4096,
            32,
            vocabulary=32000,
            sequence=4096,
            num_key_value_heads=8,
            feedforward=14336,
            experts=ExpertShape(8, 2, 14336),
            details=Details(rotary_base=1000000.0, norm="RMSNorm"),
        ),
        _modern(
            "deepseek-v3",
            61,
            7168,
            128,
            vocabulary=129280,
            sequence=4096,
            feedforward=18432,
            experts=ExpertShape(256, 8, 2048, num_shared=1),
            num_dense_layers=3,
            latent=LatentAttention(queries=1536, keys_values=512, head=128, rotary_head=64, value_head=128),
            details=Details(
                rotary_base=10000.0,
                norm="RMSNorm",
                norm_epsilon=1e-6,
                others=(
                    "experts chosen by a sigmoid with a bias for balance, from 4 of 8 groups, their weights x 2.5",
                    "a layer after the last one that predicts the token after the next",
                ),
            ),
        ),
    )
}


def model(name: str) -> Transformer:
    """Return the transformer with this name.

    >>> model("llama-3-405b").num_layers
    126
    >>> model("lama-3-405b")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: unknown model 'lama-3-405b'; did you mean llama-3-405b?
    """
    transformer = MODELS.get(name.lower())
    if transformer is None:
        raise PlanError(f"unknown model {name[:60]!r}", fix=nearest(name[:60], MODELS))
    return transformer
