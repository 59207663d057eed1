"""Small models of transformers, and their pieces as blocks under the names that they have in the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from drumline.runtime.cut import Block

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def makers() -> dict[str, Callable[[], Any]]:
    """Return a function for each model that makes it from its config, on the device that is set."""
    import transformers

    hf: Any = transformers
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    tied = {"tie_word_embeddings": True}
    gpt2 = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 64, "n_positions": 32}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
    image = {"image_size": 16, "patch_size": 4}
    vit = {name: one for name, one in _SIZES.items() if name not in ("vocab_size", "max_position_embeddings")}
    grouped = {**_SIZES, "num_key_value_heads": 2}
    causal = hf.AutoModelForCausalLM
    return {
        "llama": lambda: causal.from_config(hf.LlamaConfig(**grouped)),
        "llama, tied": lambda: causal.from_config(hf.LlamaConfig(**grouped, **tied)),
        "qwen2": lambda: causal.from_config(hf.Qwen2Config(**grouped)),
        "gpt2": lambda: causal.from_config(hf.GPT2Config(**gpt2, **special)),
        "bert": lambda: hf.AutoModelForMaskedLM.from_config(hf.BertConfig(**_SIZES)),
        "t5": lambda: hf.AutoModelForSeq2SeqLM.from_config(hf.T5Config(**t5)),
        "t5, not tied": lambda: hf.AutoModelForSeq2SeqLM.from_config(hf.T5Config(**t5, tie_word_embeddings=False)),
        "mixtral": lambda: causal.from_config(hf.MixtralConfig(**grouped, num_local_experts=4)),
        "vit": lambda: hf.AutoModelForImageClassification.from_config(hf.ViTConfig(**vit, **image)),
    }


def on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def pieces(model: nn.Module, prefix: str = "") -> Iterator[Block]:
    """Yield the largest modules that hold no list of modules, in order: layers, embeddings, norms, heads."""
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        if any(isinstance(one, nn.ModuleList) for one in child.modules()) and not _is_layer(child):
            yield from pieces(child, f"{path}.")
        else:
            yield Block(path, child)


def _is_layer(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("Layer", "Block"))


class _Layer(nn.Module):
    """A decoder layer of Llama as a block: its parts under their own names, called with what Llama gives it."""

    def __init__(self, model: Any, layer: nn.Module) -> None:
        super().__init__()
        for name, part in layer.named_children():
            self.add_module(name, part)
        self.rotary_emb = model.model.rotary_emb
        self._init_weights = model._init_weights
        self._layer = [layer]  # in a list: not a module of this one

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layer, causal, on positions counted from 0."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        made: torch.Tensor = self._layer[0](hidden, position_embeddings=self.rotary_emb(hidden, positions))
        return made


def llama_blocks(model: Any) -> dict[str, nn.Module]:
    """Cut a Llama by hand into blocks under the names of the whole."""
    layers = {f"model.layers.{number}": _Layer(model, one) for number, one in enumerate(model.model.layers)}
    return {
        "model.embed_tokens": model.model.embed_tokens,
        **layers,
        "model.norm": model.model.norm,
        "lm_head": model.lm_head,
    }
