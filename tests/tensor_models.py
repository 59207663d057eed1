"""Models that an axis tp divides, tiny ones, and what one process makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.train.models.gpt import GPT, GPTSizes
from matrices import ALL

WORDS, WIDTH, LENGTH, ROWS = 24, 16, 6, 8
LAYERS = 4 if ALL else 2


class Attention(nn.Module):
    """Queries, keys and values in one product; the number of heads is an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        each = self.qkv(x).view(rows, length, 3, self.num_heads, WIDTH // 4).permute(2, 0, 3, 1, 4)
        query, key, value = each.unbind()
        made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(made.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(self.up(x) * functional.silu(self.gate(x)))
        return down


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.feedforward = Attention(), FeedForward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norms[0](x)))
        added: Tensor = x + self.dropout(self.feedforward(self.norms[1](x)))
        return added


def chain(dropout: float = 0.0) -> nn.Sequential:
    """A decoder as a list of blocks."""
    torch.manual_seed(0)
    layers = [Layer(dropout) for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))


def plan() -> dict[str, Any]:
    """How tp divides the chain."""
    from drumline import Colwise

    return {
        "0": "embedding",
        "*.qkv": Colwise(parts=3),
        "*.attention.out": "rowwise",
        "*.up": "colwise",
        "*.gate": "colwise",
        "*.down": "rowwise",
        f"{LAYERS + 2}": "colwise_gather",
    }


def gpt(**sizes: Any) -> GPT:
    """The built-in decoder, with all that tp must respect: shared keys and values, norms of heads, tied weights."""
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "num_layers": LAYERS, "hidden": WIDTH, "num_heads": 4, "vocabulary": WORDS, "sequence": LENGTH,
        "num_key_value_heads": 2, "gated": True, "tied": True, "qk_norm": True, "biased": False,
    }  # fmt: skip
    return GPT(GPTSizes(**{**given, **sizes}))


def llama(**settings: Any) -> nn.Module:
    """A Llama of Hugging Face, from its configuration."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, **settings,
    )  # fmt: skip
    make: Callable[..., nn.Module] = LlamaForCausalLM
    return make(config)


MODELS: dict[str, Callable[..., nn.Module]] = {"chain": chain, "gpt": gpt, "llama": llama}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """A batch and its labels, some of which do not count."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return x, y.masked_fill(torch.rand(y.shape, generator=generator) < 0.3, -100)


Make = Callable[..., torch.optim.Optimizer]


def alone(kind: str, num_steps: int, optimizer: Make = torch.optim.AdamW) -> list[float]:
    """Return the losses of one process, without any of our code."""
    model = MODELS[kind]()
    update = optimizer([p for p in model.parameters() if optimizer is torch.optim.AdamW or p.dim() == 2], lr=1e-3)
    losses = []
    for step in range(num_steps):
        x, y = batch(step)
        output, target = (model(input_ids=x).logits[:, :-1], y[:, 1:]) if kind == "llama" else (model(x), y)
        loss = loss_fn(output, target)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        update.step()
        update.zero_grad()
        losses.append(loss.item())
    return losses
