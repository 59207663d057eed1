"""A small pipeline that a process makes before it forks ranks: they find what PyTorch and Drumline note once.

Following a model fills PyTorch's table of what operators give for which shapes, and a first step finds the bodies of
many functions. In a rank of a mesh that is up to a third of a second.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second = nn.LayerNorm(16), nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query, key, value = (
            part(y).unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        made: Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return made


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers, self.head = nn.Embedding(12, 16), nn.ModuleList([Layer(), Layer()]), nn.Linear(16, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x)
        for layer in self.layers:
            h = layer(h)
        logits: Tensor = self.head(h)
        return logits


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def make_one() -> None:
    """Make the pipeline and its first step, on the CPU, and leave random numbers as they were."""
    rows = torch.arange(64).reshape(8, 8) % 12
    with torch.random.fork_rng(devices=()):
        options: dict[str, Any] = {
            "num_ranks": 2,
            "transport": "in-process",
            "device": "cpu",
            "balance": "even",
            "example": rows,
        }
        with dl.Pipeline(Words(), loss_fn=loss_fn, num_microbatches=4, **options) as pipe:
            pipe.step(rows, target=rows)
    gc.collect()
    gc.freeze()  # what is left, for good: no rank goes through it
