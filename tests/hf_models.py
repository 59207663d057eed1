"""Hugging Face models small enough to train in a test, each with a batch as its users would pass it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from extras import needed

transformers: Any = needed("transformers", extra="hf")
VOCABULARY = 97
Batch = dict[str, Any]


def text(rows: int, length: int = 10, *, seed: int = 0) -> Batch:
    """Return token ids, the last of every row padding, and labels that leave the padding out."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in range(rows):
        mask[row, length - 1 - row % 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def classified_text(rows: int, length: int = 10, *, seed: int = 0) -> Batch:
    return text(rows, length, seed=seed) | {"labels": torch.arange(rows) % 2}


def images(rows: int, length: int = 16, *, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator), "labels": torch.arange(rows) % 2}


_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_T5 = {
    "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 2,
    "vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
_GPT2 = {
    "n_embd": 16, "n_layer": 6, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY, "bos_token_id": 1,
    "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_VIT = {"image_size": 16, "patch_size": 4}

MODELS: dict[str, tuple[str, dict[str, Any], Callable[..., Batch]]] = {
    "LlamaForCausalLM": ("LlamaConfig", _SIZES | {"num_key_value_heads": 1}, text),
    "Qwen2ForCausalLM": ("Qwen2Config", _SIZES | {"num_key_value_heads": 1, "tie_word_embeddings": True}, text),
    "GPT2LMHeadModel": ("GPT2Config", _GPT2, text),
    "BertForMaskedLM": ("BertConfig", _SIZES | _NO_DROPOUT, text),
    "BertForSequenceClassification": ("BertConfig", _SIZES | _NO_DROPOUT, classified_text),
    "T5ForConditionalGeneration": ("T5Config", _T5, text),
    "MixtralForCausalLM": ("MixtralConfig", _SIZES | {"num_key_value_heads": 1, "num_local_experts": 3}, text),
    "ViTForImageClassification": ("ViTConfig", _SIZES | _NO_DROPOUT | _VIT, images),
}


def tiny(name: str, *, seed: int = 0, **changes: Any) -> nn.Module:
    """Return a model of a known class with few and small layers."""
    config, sizes, _ = MODELS[name]
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, name)(getattr(transformers, config)(**{**sizes, **changes}))
    return model.train()


def batch_for(name: str, rows: int, length: int = 10, *, seed: int = 0) -> Batch:
    return MODELS[name][2](rows, length, seed=seed)


# Families whose configuration cannot be cut down by the sizes below, so that no small model of them runs even unsplit.
UNRUNNABLE = ("cohere_compass_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "mimo_v2_flash")


def families() -> list[str]:
    """Return the families of causal language models for which transformers itself has a pipeline plan."""
    found = []
    for name in transformers.CONFIG_MAPPING:
        config = transformers.CONFIG_MAPPING[name]
        if getattr(config, "base_model_pp_plan", None) and config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            found.append(name)
    return found


_SMALL = {
    **_SIZES, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 8, "n_embd": 16, "n_layer": 3, "n_head": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_intermediate_size": 16,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16, "num_nextn_predict_layers": 0,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
}  # fmt: skip


def tiny_family(name: str) -> nn.Module:
    """Return a causal language model of a family, its sizes cut down wherever its configuration has them."""
    kind: Any = transformers.CONFIG_MAPPING[name]
    known = kind()
    sizes: dict[str, Any] = {key: value for key, value in _SMALL.items() if hasattr(known, key)}
    if getattr(known, "kv_lora_rank", None) is not None:
        sizes["head_dim"] = _SMALL["qk_rope_head_dim"]
    kinds = list(dict.fromkeys(getattr(known, "layer_types", None) or ()))
    if kinds:
        sizes["layer_types"] = [kinds[layer % len(kinds)] for layer in range(3)]
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model: nn.Module = auto.from_config(kind(**sizes)).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def takes_cache(model: nn.Module) -> bool:
    return "use_cache" in inspect.signature(model.forward).parameters


def losses_by_microbatch(model: nn.Module, batch: Batch, num_microbatches: int, weights: list[float]) -> list[Tensor]:
    """Run the unsplit model on every microbatch and back; returns each loss, weighted."""
    found = []
    pieces = {name: value.tensor_split(num_microbatches) for name, value in batch.items()}
    total = sum(weights)
    for number, weight in enumerate(weights):
        extra = {"use_cache": False} if takes_cache(model) else {}
        loss = model(**{name: each[number] for name, each in pieces.items()}, **extra).loss
        share = torch.tensor(weight / total, dtype=torch.float64).to(loss.dtype)
        loss.backward(share)
        found.append(loss.detach() * share)
    return found
