"""Read a transformer from the `config.json` next to its weights, as plain data.

It reads sizes first, then the rest: attention, positions, biases, and a phrase for every key that it does not
understand.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from drumline.core.errors import PlanError
from drumline.core.files import FileKind, named, read_object
from drumline.core.parsed import shown
from drumline.plan.cluster.transformer import Details, ExpertShape, LatentAttention, Transformer

# Values that configs store under different names.
_NAMES = {
    "num_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "n_embed"),
    "num_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "vocabulary": ("vocab_size",),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length", "n_ctx", "max_seq_len"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads"),
    "feedforward": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "head_width": ("head_dim",),
    "num_experts": ("num_local_experts", "n_routed_experts", "num_experts"),
    "per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "expert_width": ("moe_intermediate_size",),
    "num_shared": ("n_shared_experts", "num_shared_experts"),
    "num_dense_layers": ("first_k_dense_replace",),
}
_KEYS = frozenset(key for keys in _NAMES.values() for key in keys)
_KIND = FileKind("config", PlanError, "the config.json of a Hugging Face model")
# Far more than any model has, but few enough to plan for.
_MOST_LAYERS, _MOST = 10_000, 2**31
_NEEDED = ("num_layers", "hidden", "num_heads", "vocabulary")
# Early families: two matrices in the feed-forward, biases everywhere, learned positions or none.
_PLAIN = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "opt", "bloom", "falcon", "mpt", "gpt_bigcode", "phi", "starcoder2")
_UNGATED = (*_PLAIN, "nemotron")
# Files hold what differs from the library's default, which is to tie: these families leave it.
_TIED = (*_PLAIN, "gemma", "gemma2", "gemma3", "gemma3_text", "cohere", "cohere2")
_LEARNED = ("gpt2", "gpt_neo", "opt", "gpt_bigcode")


def read_config(path: str | Path) -> Transformer:
    """Return the transformer that a config file describes, named after the folder or the file."""
    place = Path(path)
    config = read_object(place, _KIND)
    plain = place.stem if place.stem != "config" else place.resolve().parent.name
    with named(path, _KIND):
        return transformer_of(config, name=plain or "config")


def transformer_of(config: Any, *, name: str) -> Transformer:
    """Return the transformer that a config describes.

    >>> llama = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    ...          "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    ...          "max_position_embeddings": 8192, "tie_word_embeddings": False}
    >>> transformer = transformer_of(llama, name="mine")
    >>> transformer.num_layers, transformer.gated, transformer.num_key_value_heads
    (32, True, 8)
    """
    if not isinstance(config, Mapping):
        raise PlanError(f"the config is a {type(config).__name__}", expected="an object")
    if isinstance(config.get("text_config"), Mapping):  # multimodal models
        config = {**config, **config["text_config"]}
    sizes = {key: _number(config, key) for key in _NAMES}
    assumed = () if sizes["sequence"] else (f"no length of sequences: planned with {_ASSUMED} tokens",)
    sizes["sequence"] = sizes["sequence"] or _ASSUMED
    lacking = [key for key in _NEEDED if not sizes[key]]
    if lacking:
        raise PlanError(
            f"the config of {name} has no {' or '.join(_NAMES[lacking[0]])}",
            expected="the config.json of a decoder-only transformer",
        )
    family = str(config.get("model_type", ""))
    plain = family in _PLAIN
    experts = None
    if sizes["num_experts"] > 1:
        width = sizes["expert_width"] or sizes["feedforward"]
        wide = _whole(config, _SHARED, _MOST)
        num_shared = sizes["num_shared"] or -(-wide // max(width, 1))
        experts = ExpertShape(sizes["num_experts"], max(sizes["per_token"], 1), width, num_shared)
    shared, latent = sizes["num_key_value_heads"], _latent(config)
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        shared = 1
    if latent is None and (narrow := _whole(config, "kv_lora_rank", _MOST)):  # its other widths are not named
        width = sizes["head_width"] or max(sizes["hidden"] // sizes["num_heads"], 1)
        shared = _shared_heads(width, narrow + _whole(config, "qk_rope_head_dim", _MOST))
    return Transformer(
        name,
        sizes["num_layers"],
        sizes["hidden"],
        sizes["num_heads"],
        sizes["vocabulary"],
        sizes["sequence"],
        shared,
        sizes["feedforward"],
        gated=family not in _UNGATED,
        tied=bool(config.get("tie_word_embeddings", family in _TIED)),
        learned_positions=family in _LEARNED,
        experts=experts,
        num_dense_layers=sizes["num_dense_layers"] if experts else 0,
        head_width=sizes["head_width"],
        latent=latent,
        biased=plain,
        dropout=any(config.get(key) for key in _DROPOUTS),
        details=_also(details_of(config, read=_KEYS, gated=family not in _UNGATED), assumed),
    )


def _also(details: Details, others: tuple[str, ...]) -> Details:
    return replace(details, others=(*details.others, *others)) if others else details


def _shared_heads(width: float, narrow: int) -> int:
    """Return the fewest heads of keys and values, a power of two, that are as wide as the narrow projection."""
    shared = 1
    while 2 * shared * width < narrow:
        shared *= 2
    return shared


_DROPOUTS = ("attention_dropout", "resid_pdrop", "attn_pdrop", "hidden_dropout", "dropout")
_ASSUMED = 2048  # tokens of a sequence, if a config does not say


def _number(config: Mapping[str, Any], key: str) -> int:
    most = _MOST_LAYERS if key in ("num_layers", "num_dense_layers", "num_experts") else _MOST
    return next((_whole(config, name, most) for name in _NAMES[key] if config.get(name) is not None), 0)


def _whole(config: Mapping[str, Any], name: str, most: int) -> int:
    """Return a number from a config; 0 if it is missing or null."""
    value = config.get(name)
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value <= most:
        raise PlanError(f"{name} is {shown(value)}", expected=f"a whole number up to {most}")
    return value


_ALIBI = ("bloom", "mpt")
_QK_NORM = ("qwen3", "qwen3_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_SHARED = "shared_expert_intermediate_size"  # of all shared experts together
# The kind of norm, by the key of what it adds; a family that says otherwise comes first.
_NORM_KEYS = {
    "rms_norm_eps": "RMSNorm",
    "layer_norm_epsilon": "LayerNorm",
    "layer_norm_eps": "LayerNorm",
    "layernorm_epsilon": "LayerNorm",
    "norm_eps": "",
    "norm_epsilon": "",
}
_NORMS = {
    "nemotron": "LayerNorm1P",
    **dict.fromkeys((*_PLAIN, "cohere", "cohere2"), "LayerNorm"),
    **dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"), "RMSNorm"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "gemma3", "phi3", "olmoe"), "RMSNorm"),
}
_SQUARED = "relu2"
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Keys that are read here, besides sizes.
_ROTARY = ("rope_theta", "rope_parameters")
_READ = (
    "model_type",
    "text_config",
    "tie_word_embeddings",
    "use_sliding_window",
    "alibi",
    "multi_query",
    _SHARED,
    *_ROTARY,
    *_LATENT,
)
# Keys about tokens, files, initial values, number formats, and generation only.
_ABOUT_FILES = ("architectures", "auto_map", "transformers_version", "_name_or_path", "tokenizer_class")
_ABOUT_NUMBERS = ("torch_dtype", "dtype", "initializer_range", "quantization_config", "scale_attn_weights")
_ABOUT_RUNS = ("pretraining_tp", "ep_size", "gradient_checkpointing", "attn_implementation", "_attn_implementation")
_ABOUT_LOSSES = ("output_router_logits", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "task_specific_params")
_ABOUT_OUTPUTS = ("use_cache", "return_dict", "output_attentions", "output_hidden_states", "is_decoder")
_OTHER_SENSES = ("vision_config", "audio_config")
_HARMLESS = (*_ABOUT_FILES, *_ABOUT_NUMBERS, *_ABOUT_RUNS, *_ABOUT_LOSSES, *_ABOUT_OUTPUTS, *_OTHER_SENSES)
_HARMLESS_PARTS = ("_token_id", "_token_index", "summary_", "dropout", "pdrop")
_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")
_EVERY_LAYER = ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "partial_rotary_factor")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")


def details_of(config: Mapping[str, Any], *, read: frozenset[str], gated: bool) -> Details:
    """Return the details of a config; `read` holds the keys that the sizes came from.

    >>> details = details_of({"rope_theta": 1e6, "sliding_window": 4096}, read=frozenset(), gated=True)
    >>> details.rotary_base, details.others
    (1000000.0, ('sliding_window 4096',))
    """
    family = str(config.get("model_type", ""))
    latent = _latent(config)
    others = tuple(_others(config, {*_READ, *_HARMLESS, *read}, gated))
    if latent is None and config.get("kv_lora_rank"):
        others += ("latent attention with unnamed widths",)
    return Details(
        alibi=family in _ALIBI or config.get("alibi") is True,
        rotary_base=_rotary_base(config),
        qk_norm=family in _QK_NORM,
        qkv_bias=family in _QKV_BIAS,
        norm=_norm(config, family),
        norm_epsilon=_number_of(config, _NORM_KEYS),
        activation=_SQUARED if not gated and _SQUARED in (config.get(name) for name in _ACTIVATIONS) else "",
        others=others,
    )


def _latent(config: Mapping[str, Any]) -> LatentAttention | None:
    widths = [_whole(config, name, _MOST) for name in _LATENT]
    return LatentAttention(*widths) if all(widths[1:]) else None


def _norm(config: Mapping[str, Any], family: str) -> str:
    """Return the kind of norm; empty if the config does not tell.

    >>> _norm({"rms_norm_eps": 1e-5}, "llama"), _norm({"norm_eps": 1e-5}, "nemotron"), _norm({}, "mine")
    ('RMSNorm', 'LayerNorm1P', '')
    """
    return _NORMS.get(family) or next((kind for key, kind in _NORM_KEYS.items() if config.get(key)), "")


def _number_of(config: Mapping[str, Any], names: Iterable[str]) -> float:
    """Return the first of these numbers that a config has, 0 if it has none."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise PlanError(f"{name} is {shown(value)}", expected="a number from 0 to less than 1")
            return float(value)
    return 0.0


def _rotary_base(config: Mapping[str, Any]) -> float:
    nested = config.get("rope_parameters")
    base = config.get("rope_theta") or (nested.get("rope_theta") if isinstance(nested, Mapping) else None) or 0.0
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise PlanError(f"rope_theta is {base!r}", expected="a number")
    return float(base)


def _others(config: Mapping[str, Any], understood: set[str], gated: bool) -> Iterator[str]:
    """Yield a phrase for every key that may change the model."""
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and nested.get("rope_type", "default") != "default":
        yield _phrase("rope_parameters", nested)
    if config.get("bias") is False and not gated:
        yield "no biases"
    for key, value in config.items():
        if key in understood or key in _NORM_KEYS or any(part in key for part in _HARMLESS_PARTS):
            continue
        if value is None or value is False or value in ("", [], {}):
            continue
        if key in _WINDOWS and (config.get("use_sliding_window") is False or _is_full(value)):
            continue
        if key in _EVERY_LAYER and value == 1:
            continue
        if key in _ACTIVATIONS and (value in ("silu", "swish") if gated else "gelu" in str(value) or value == _SQUARED):
            continue
        yield _phrase(key, value)


def _is_full(value: Any) -> bool:
    """Whether all layers attend to all tokens."""
    return isinstance(value, list) and all(item == "full_attention" for item in value)


def _phrase(key: str, value: Any) -> str:
    """Return a key with its value, as one short line.

    >>> _phrase("num_nextn_predict_layers", 1), _phrase("attention_bias", True)
    ('num_nextn_predict_layers 1', 'attention_bias')
    """
    shown = "" if value is True else f" {value}"
    text = " ".join(f"{key}{shown}".split())
    return text if len(text) <= 100 else f"{text[:97]}..."
