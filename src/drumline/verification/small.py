"""The models that `verify` runs unless it gets one: an MLP, or a decoder that every axis of a mesh can divide."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from drumline.core.program import Program
from drumline.core.slices.division import SliceLengths
from drumline.engine.model.sources import Material
from drumline.model.layers.moe import MoE

_WIDTH = 32
_WORDS = 37
_HEADS = 4
_LENGTH = 16


def small(program: Program, dropout: float, mesh: Mapping[str, int], division: SliceLengths) -> Material:
    """Return a model with at least one block per stage, and a batch that does not divide evenly."""
    slices = division.num_slices
    rows = 4 * program.num_microbatches * mesh.get("dp", 1) * mesh.get("ep", 1) + 1
    if slices > 1 or any(mesh.get(axis, 1) > 1 for axis in ("tp", "cp", "ep")):
        length = sum(division.lengths) or (_LENGTH if slices == 1 else 4 * slices)
        tokens = torch.randint(_WORDS, (2, rows, length))
        model = _Decoder(max(4, program.num_stages), dropout, mesh.get("ep", 1), length)
        return Material(model, _loss, tokens[0], tokens[1])
    blocks = (
        nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.LayerNorm(_WIDTH), nn.GELU(), nn.Dropout(dropout))
        for _ in range(max(8, program.num_stages))
    )
    return Material(
        nn.Sequential(*blocks), nn.functional.mse_loss, torch.randn(rows, _WIDTH), torch.randn(rows, _WIDTH)
    )


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class _Decoder(nn.Module):
    """A small language model; with `lines` above 1 its feed-forwards are mixtures of twice as many experts."""

    def __init__(self, num_blocks: int, dropout: float, lines: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(_WORDS, _WIDTH), nn.Embedding(length, _WIDTH)
        self.blocks = nn.ModuleList(_Block(dropout, 2 * lines if lines > 1 else 0) for _ in range(num_blocks))
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)

    @property
    def tensor_parallel_plan(self) -> dict[str, str]:
        """How an axis tp divides the layers."""
        inner = dict.fromkeys(("attention.query", "attention.key", "attention.value", "feedforward.up"), "colwise")
        outer = dict.fromkeys(("attention.out", "feedforward.down"), "rowwise")
        return {f"blocks.*.{name}": style for name, style in {**inner, **outer}.items()}

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return logits; parts of rows need positions."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        x = self.words(tokens) + self.places(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


class _Block(nn.Module):
    def __init__(self, dropout: float, num_experts: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.LayerNorm(_WIDTH), _Attention()
        self.feedforward_norm = nn.LayerNorm(_WIDTH)
        self.feedforward = MoE(_WIDTH, 2 * _WIDTH, num_experts) if num_experts else _FeedForward()
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        output: Tensor = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        return output


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            linear(x).reshape(*x.shape[:2], -1, _WIDTH // _HEADS).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        output: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return output


class _FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(nn.functional.gelu(self.up(x)))
        return output
