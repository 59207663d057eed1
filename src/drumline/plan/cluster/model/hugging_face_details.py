"""What a config says beside sizes: attention, positions, biases, and a phrase for every key that is not understood."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from drumline.core.errors import PlanError
from drumline.plan.cluster.model.details import Details, Latent

_ALIBI = ("bloom", "mpt")
_QK_NORM = ("qwen3", "qwen3_moe")
_QKV_BIAS = ("qwen2", "qwen2_moe")
_LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
# Read here or beside sizes.
_READ = (
    "model_type",
    "text_config",
    "tie_word_embeddings",
    "rope_theta",
    "rope_parameters",
    "use_sliding_window",
    "alibi",
    *_LATENT,
)
# About tokens, files, numbers at the start, kinds of numbers, and what is only there while something is generated.
_HARMLESS = (
    "architectures",
    "auto_map",
    "transformers_version",
    "torch_dtype",
    "dtype",
    "use_cache",
    "_name_or_path",
    "initializer_range",
    "pretraining_tp",
    "ep_size",
    "quantization_config",
    "tokenizer_class",
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "seq_aux",
    "vision_config",
    "audio_config",
    "task_specific_params",
    "scale_attn_weights",
    "gradient_checkpointing",
    "attn_implementation",
    "_attn_implementation",
    "is_decoder",
)
_HARMLESS_PARTS = ("_token_id", "_token_index", "summary_", "dropout", "pdrop")
_WINDOWS = ("sliding_window", "max_window_layers", "layer_types")
_EVERY_LAYER = ("moe_layer_freq", "decoder_sparse_step", "interleave_moe_layer_step", "partial_rotary_factor")
_ACTIVATIONS = ("hidden_act", "activation_function", "hidden_activation", "activation")


def details_of(config: Mapping[str, Any], *, read: frozenset[str], gated: bool) -> Details:
    """Return the details of a config; `read` are the keys that sizes were taken from.

    >>> found = details_of({"rope_theta": 1e6, "sliding_window": 4096}, read=frozenset(), gated=True)
    >>> found.rotary_base, found.others
    (1000000.0, ('sliding_window 4096',))
    """
    family = str(config.get("model_type", ""))
    latent = _latent(config)
    others = tuple(_others(config, {*_READ, *_HARMLESS, *read}, gated))
    if latent is None and config.get("kv_lora_rank"):
        others += ("latent attention, whose widths the config does not name",)
    return Details(
        latent=latent,
        alibi=family in _ALIBI or config.get("alibi") is True,
        rotary_base=_rotary_base(config),
        qk_norm=family in _QK_NORM,
        qkv_bias=family in _QKV_BIAS,
        others=others,
    )


def _latent(config: Mapping[str, Any]) -> Latent | None:
    widths = [config.get(name) or 0 for name in _LATENT]
    for name, width in zip(_LATENT, widths, strict=True):
        if isinstance(width, bool) or not isinstance(width, int):
            raise PlanError(f"{name} is {width!r}", expected="a whole number")
    return Latent(*widths) if all(widths[1:]) else None


def _rotary_base(config: Mapping[str, Any]) -> float:
    nested = config.get("rope_parameters")
    base = config.get("rope_theta") or (nested.get("rope_theta") if isinstance(nested, Mapping) else None) or 0.0
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise PlanError(f"rope_theta is {base!r}", expected="a number")
    return float(base)


def _others(config: Mapping[str, Any], understood: set[str], gated: bool) -> Iterator[str]:
    """Yield a phrase for every key that may make it another model."""
    nested = config.get("rope_parameters")
    if isinstance(nested, Mapping) and nested.get("rope_type", "default") != "default":
        yield _phrase("rope_parameters", nested)
    if config.get("bias") is False and not gated:
        yield "no biases"
    for key, value in config.items():
        if key in understood or any(part in key for part in _HARMLESS_PARTS) or _means_nothing(value):
            continue
        if key in _WINDOWS and (config.get("use_sliding_window") is False or _is_full(value)):
            continue
        if key in _EVERY_LAYER and value == 1:
            continue
        if key in _ACTIVATIONS and (value in ("silu", "swish") if gated else "gelu" in str(value)):
            continue
        yield _phrase(key, value)


def _means_nothing(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def _is_full(value: Any) -> bool:
    """Whether all layers attend to everything."""
    return isinstance(value, list) and all(one == "full_attention" for one in value)


def _phrase(key: str, value: Any) -> str:
    """Return a key with its value, in one short line.

    >>> _phrase("num_nextn_predict_layers", 1), _phrase("attention_bias", True)
    ('num_nextn_predict_layers 1', 'attention_bias')
    """
    shown = "" if value is True else f" {value}"
    text = " ".join(f"{key}{shown}".split())
    return text if len(text) <= 100 else f"{text[:97]}..."
