"""Models and rows of the trainers' scripts: a small one that is quickly traced, Llama, and both with adapters."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from extras import needed
from hf_models import VOCABULARY, tiny

transformers: Any = needed("transformers", extra="hf")
peft: Any = needed("peft", extra="tune")
LENGTH = 8


class SmallConfig(transformers.PretrainedConfig):
    model_type = "small"

    def __init__(self, num_hidden_layers: int = 2, **named: Any) -> None:
        self.num_hidden_layers, self.hidden_size, self.vocab_size = num_hidden_layers, 16, VOCABULARY
        super().__init__(**named)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.q_proj(x))


class SmallForCausalLM(transformers.PreTrainedModel):
    """A model of transformers without attention: it takes a tenth of a Llama's time to trace."""

    config_class = SmallConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(Block() for _ in range(config.num_hidden_layers))
        self.norm: nn.Module = nn.Identity()
        self.lm_head = nn.Linear(16, VOCABULARY)
        self.post_init()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **named: Any) -> Any:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x))
        sizes = {"vocab_size": VOCABULARY, **named}
        loss = None if labels is None else self.loss_function(logits=logits, labels=labels, **sizes)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def small(layers: int = 2) -> Any:
    torch.manual_seed(0)
    return SmallForCausalLM(SmallConfig(layers))


def llama(layers: int = 2) -> nn.Module:
    return tiny("LlamaForCausalLM", num_hidden_layers=layers)


def with_adapters(layers: int = 2, base: Callable[[int], nn.Module] = llama) -> nn.Module:
    """Return a model with adapters in its last layer, so that the first rank trains nothing."""
    task = "CAUSAL_LM" if base is llama else None
    last = rf".*layers\.{layers - 1}\..*q_proj"
    settings = peft.LoraConfig(r=4, target_modules=last, init_lora_weights=False, task_type=task)
    model = base(layers)
    torch.manual_seed(1)
    adapted: nn.Module = peft.get_peft_model(model, settings)
    return adapted


def small_with_adapters(layers: int = 2) -> nn.Module:
    return with_adapters(layers, small)


def texts(count: int, seed: int = 0, length: int = LENGTH) -> list[dict[str, Any]]:
    """Return rows of equal length, of which more and fewer labels count, with a column that no model takes."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        labels = ids.clone()
        labels[: number % length] = -100
        rows.append({"input_ids": ids, "labels": labels, "name": f"row {number}"})
    return rows


def masking(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate rows, and leave out tokens at random: by the generators of torch, of Python and of NumPy."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    left_out = torch.rand(batch["labels"].shape) < random.random() * np.random.random()
    return {**batch, "labels": batch["labels"].masked_fill(left_out, -100)}
