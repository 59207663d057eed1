"""Small models and losses that every axis of a mesh can divide, written with torch alone but for layers of experts.

The plain twin of a model has the same parameters, and nothing of Drumline in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl

WORDS, WIDTH, HEADS, EXPERTS, LONGEST = 8, 8, 2, 4, 8
IGNORED = -100
PLAN = {
    "tokens": "embedding",
    "*.query": "colwise", "*.key": "colwise", "*.value": "colwise", "*.out": "rowwise",
    "*.up": "colwise", "*.down": "rowwise",
}  # fmt: skip


def chain(*, tied: bool = False) -> nn.Sequential:
    """Return a model of ten blocks."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    made = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS, bias=False))
    if tied:
        made[9].weight = made[0].weight
    return made


class Attention(nn.Module):
    """Causal attention; some heads of keys and values may serve several of queries."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, groups * size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """Attend."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        key, value = (item.repeat_interleave(query.shape[1] // item.shape[1], 1) for item in (key, value))
        made = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.out(made.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many features."""
        down: Tensor = self.down(functional.gelu(self.up(x)))
        return down


class PlainExperts(nn.Module):
    """What `dl.MoE` computes, in a loop over experts: the two best of each token, weighted by their chances."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), nn.Module()
        self.experts.w1 = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))
        self.experts.w2 = nn.Parameter(torch.empty(EXPERTS, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each token."""
        chances, chosen = self.router(x).float().softmax(-1).topk(2)
        chances = (chances / chances.sum(-1, keepdim=True)).to(x.dtype)
        made, first, second = torch.zeros_like(x), *(self.experts.get_parameter(name) for name in ("w1", "w2"))
        for number in range(EXPERTS):
            inner = functional.gelu(functional.linear(x, first[number]))
            weight = (chances * (chosen == number)).sum(-1, keepdim=True)
            made = made + weight * functional.linear(inner, second[number])
        return made


class Layer(nn.Module):
    """Attention, then a feed-forward or experts."""

    def __init__(self, inner: nn.Module, groups: int) -> None:
        super().__init__()
        self.norm, self.attention, self.second = nn.LayerNorm(WIDTH), Attention(groups), nn.LayerNorm(WIDTH)
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        x = x + self.attention(self.norm(x))
        added: Tensor = x + self.inner(self.second(x))
        return added


class Decoder(nn.Module):
    """A decoder that takes positions; with `own`, its forward takes labels and returns its own loss."""

    def __init__(self, inner: Callable[[], nn.Module], *, tied: bool, groups: int, own: str) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LONGEST, WIDTH)
        self.layers = nn.ModuleList([Layer(FeedForward() if at % 2 else inner(), groups) for at in range(4)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.own = own
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, labels: Tensor | None = None, positions: Tensor | None = None) -> Any:
        """Return logits, or the loss too."""
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        h = self.tokens(x) + self.places(positions)
        for layer in self.layers:
            h = layer(h)
        h = self.norm(h)
        logits = self.head(h)
        if labels is None or not self.own:
            return logits
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.own == "two":
            loss = loss + 0.1 * h.pow(2).mean()
        return {"loss": loss, "logits": logits}


def model(kind: str, dtype: torch.dtype, *, plain: bool, tied: bool, frozen: bool, groups: int, own: str) -> nn.Module:
    """Return a model, or its plain twin, with the same values everywhere."""
    if kind == "chain":
        made: nn.Module = chain(tied=tied)
    else:
        experts = PlainExperts if plain else partial(dl.MoE, WIDTH, WIDTH, num_experts=EXPERTS, top_k=2)
        made = Decoder(experts if kind == "experts" else FeedForward, tied=tied, groups=groups, own=own)
    made = made.to(dtype)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, param in sorted(made.named_parameters()):
            param.copy_(torch.randn(param.shape, generator=chance, dtype=torch.float64) * 0.4)
    if frozen:
        for part in list(made.children())[:2]:
            part.requires_grad_(False)
    return made


@dataclass(frozen=True)
class Loss:
    """A loss function, and what it averages over, None for a sum."""

    function: Callable[[Tensor, Tensor], Tensor]
    count: Callable[[Tensor], float] | None
    is_labels: bool = True  # else it takes numbers
    near: float = 0.0  # how far results may be off because of what it computes in lower precision


def _flat(**more: Any) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten(), **more)

    return loss


def _weighted(output: Tensor, target: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 2.0, WORDS, dtype=output.dtype)
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), weight=weight)


def _masked(output: Tensor, target: Tensor) -> Tensor:
    mask = target != IGNORED
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (each * mask).sum() / mask.sum()


def _nll(output: Tensor, target: Tensor) -> Tensor:
    return functional.nll_loss(output.log_softmax(-1).transpose(1, 2), target)


def _transposed(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target)


def _low(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def _labels(target: Tensor) -> float:
    return float((target != IGNORED).sum())


def _weights(target: Tensor) -> float:
    known = target[target != IGNORED]
    return float(torch.linspace(0.5, 2.0, WORDS, dtype=torch.float64)[known].sum())


LOSSES = {
    "cross-entropy": Loss(_flat(), _labels),
    "transposed": Loss(_transposed, _labels),
    "nll": Loss(_nll, _labels),
    "weighted": Loss(_weighted, _weights),
    "smoothed": Loss(_flat(label_smoothing=0.1), _labels),
    "sum": Loss(_flat(reduction="sum"), None),
    "masked": Loss(_masked, _labels),
    "float32": Loss(_low, _labels, near=1e-6),
    "mse": Loss(functional.mse_loss, lambda target: float(target.numel()), is_labels=False),
    "mse sum": Loss(partial(functional.mse_loss, reduction="sum"), None, is_labels=False),
    "l1": Loss(functional.l1_loss, lambda target: float(target.numel()), is_labels=False),
}
