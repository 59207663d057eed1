"""A decoder with every choice that `ModelSettings` names, in blocks that a pipeline can cut.

    tokens ─► embedding ─► block 0 ─► block 1 ─► ... ─► norm ─► head ─► logits
                  positions, mask ┴───────┴─── go along, or are made again behind a cut

`biased` models have LayerNorms and a bias behind every product, others RMSNorms and none. A gated feed-forward has no
bias at its gate, as `drumline.plan` counts it.

Rows may hold several documents side by side. `document_ids`, of the tokens' shape, numbers them: tokens look back only
inside their own document, and positions start at 0 in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError

_STD = 0.02


@dataclass(frozen=True, slots=True)
class GPTSizes:
    """The numbers of a decoder, all of them decided.

    >>> GPTSizes(num_layers=2, hidden=64, num_heads=4, vocabulary=257, sequence=32).feedforward
    256
    >>> GPTSizes(num_layers=2, hidden=64, num_heads=4, vocabulary=257, sequence=32, gated=True).feedforward
    176
    """

    num_layers: int
    hidden: int
    num_heads: int
    vocabulary: int
    sequence: int
    num_key_value_heads: int = 0
    feedforward: int = 0
    head_width: int = 0
    gated: bool = False
    tied: bool = False
    learned_positions: bool = True
    rotary_base: float = 10000.0
    biased: bool = True
    dropout: float = 0.0
    attention_dropout: float | None = None
    qk_norm: bool = False
    qkv_bias: bool = False

    def __post_init__(self) -> None:
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_heads)
        if not self.feedforward:
            inner = -(-8 * self.hidden // 24) * 8 if self.gated else 4 * self.hidden
            object.__setattr__(self, "feedforward", inner)
        if not self.head_width:
            object.__setattr__(self, "head_width", max(self.hidden // self.num_heads, 1))
        if self.attention_dropout is None:
            object.__setattr__(self, "attention_dropout", self.dropout)
        if not self.learned_positions and self.head_width % 2:
            raise ModelError(
                f"heads are {self.head_width} wide, and positions are rotary",
                expected="an even width, whose halves are rotated",
                fix="change model.hidden, model.num_heads or model.head_width",
            )


class GPT(nn.Module):
    """The decoder; `forward` returns logits for every token.

    >>> model = GPT(GPTSizes(num_layers=2, hidden=16, num_heads=2, vocabulary=10, sequence=8))
    >>> model(torch.zeros(3, 5, dtype=torch.long)).shape
    torch.Size([3, 5, 10])
    """

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = Embedding(sizes)
        self.blocks = nn.ModuleList([Block(sizes) for _ in range(sizes.num_layers)])
        self.norm = _norm(sizes, sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.tied:
            self.head.weight = self.embedding.tokens.weight
        self.apply(self._init_weights)

    @property
    def tensor_parallel_plan(self) -> dict[str, str]:
        """How the axis tp of a mesh divides the layers.

        >>> GPT(GPTSizes(num_layers=1, hidden=8, num_heads=2, vocabulary=4, sequence=4)).tensor_parallel_plan["head"]
        'colwise_gather'
        """
        layers = {
            **dict.fromkeys(("attention.query", "attention.key", "attention.value"), "colwise"),
            **dict.fromkeys(("feedforward.gate", "feedforward.up"), "colwise"),
            **dict.fromkeys(("attention.out", "feedforward.out"), "rowwise"),
            **dict.fromkeys(("attention.query_norm", "attention.key_norm"), "partial"),
        }
        blocks = {f"blocks.*.{name}": style for name, style in layers.items()}
        return {"embedding.tokens": "embedding", **blocks, "head": "colwise_gather"}

    def forward(self, tokens: Tensor, document_ids: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Return logits of the shape (rows, length, vocabulary); rows that are parts of longer ones need positions."""
        if tokens.shape[1] > self.sizes.sequence and self.sizes.learned_positions:
            raise ModelError(
                f"a row has {tokens.shape[1]} tokens, and the model has {self.sizes.sequence} learned positions",
                expected=f"at most {self.sizes.sequence}",
                fix="raise batch.sequence, or use rotary positions (model.learned_positions = false)",
            )
        if positions is None:
            positions = positions_of(tokens, document_ids)
        mask = None if document_ids is None else document_mask(document_ids)
        rotation = None if self.sizes.learned_positions else rotation_of(positions, self.sizes)
        x = self.embedding(tokens, positions)
        for block in self.blocks:
            x = block(x, rotation, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=getattr(module, "initial_std", _STD))
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)


class Embedding(nn.Module):
    """Tokens and, where they are learned, positions."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden) if sizes.learned_positions else None
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else None

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return what the first block gets."""
        x: Tensor = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(positions)
        return x if self.dropout is None else self.dropout(x)


class Block(nn.Module):
    """Attention, then a feed-forward, each behind a norm and added to what came in."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.attention_norm = _norm(sizes, sizes.hidden)
        self.attention = Attention(sizes)
        self.feedforward_norm = _norm(sizes, sizes.hidden)
        self.feedforward = FeedForward(sizes)
        self.dropout = nn.Dropout(sizes.dropout) if sizes.dropout else nn.Identity()

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """Return what the next block gets."""
        x = x + self.dropout(self.attention(self.attention_norm(x), rotation, mask))
        added: Tensor = x + self.dropout(self.feedforward(self.feedforward_norm(x)))
        return added


class Attention(nn.Module):
    """Causal attention; several heads may share keys and values."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, shared = sizes.num_heads * sizes.head_width, sizes.num_key_value_heads * sizes.head_width
        bias = sizes.biased or sizes.qkv_bias
        self.query = nn.Linear(sizes.hidden, width, bias=bias)
        self.key = nn.Linear(sizes.hidden, shared, bias=bias)
        self.value = nn.Linear(sizes.hidden, shared, bias=bias)
        self.out = _into_residual(sizes, width)
        self.query_norm = _norm(sizes, sizes.head_width) if sizes.qk_norm else None
        self.key_norm = _norm(sizes, sizes.head_width) if sizes.qk_norm else None

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor] | None, mask: Tensor | None) -> Tensor:
        """Return what is added to the residual."""
        query, key, value = (self._heads(linear(x)) for linear in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if rotation is not None:
            query, key = rotated(query, rotation), rotated(key, rotation)
        attended = functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=(self.sizes.attention_dropout or 0.0) if self.training else 0.0,
            is_causal=mask is None,
            enable_gqa=self.sizes.num_key_value_heads != self.sizes.num_heads,
        )
        out: Tensor = self.out(attended.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.reshape(*x.shape[:2], -1, self.sizes.head_width)


class FeedForward(nn.Module):
    """Two products with a GELU between them, or SwiGLU's three."""

    def __init__(self, sizes: GPTSizes) -> None:
        super().__init__()
        self.gate = nn.Linear(sizes.hidden, sizes.feedforward, bias=False) if sizes.gated else None
        self.up = nn.Linear(sizes.hidden, sizes.feedforward, bias=sizes.biased)
        self.out = _into_residual(sizes, sizes.feedforward)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the residual."""
        inner = self.up(x)
        inner = functional.gelu(inner) if self.gate is None else functional.silu(self.gate(x)) * inner
        out: Tensor = self.out(inner)
        return out


def positions_of(tokens: Tensor, document_ids: Tensor | None) -> Tensor:
    """Return the place of every token in its row, or in its document.

    >>> positions_of(torch.zeros(1, 5), torch.tensor([[0, 0, 1, 1, 1]])).tolist()
    [[0, 1, 0, 1, 2]]
    """
    places = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    if document_ids is None:
        return places
    # Without changes in place, so that a stage behind a cut computes them again instead of getting them.
    begins = functional.pad((document_ids[:, 1:] != document_ids[:, :-1]).long(), (1, 0))
    return places - torch.cummax(begins * places, dim=1).values


def document_mask(document_ids: Tensor) -> Tensor:
    """Return which tokens each may look at: earlier ones of its own document.

    >>> document_mask(torch.tensor([[0, 0, 1]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return ((document_ids.unsqueeze(2) == document_ids.unsqueeze(1)) & causal).unsqueeze(1)


def rotation_of(positions: Tensor, sizes: GPTSizes) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of every position, each of the shape (rows, length, 1, half a head)."""
    half = sizes.head_width // 2
    powers = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = (positions.unsqueeze(2) * sizes.rotary_base**-powers).unsqueeze(2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys of the shape (rows, length, heads, width), turned by their positions."""
    cosine, sine = (tensor.to(x.dtype) for tensor in rotation)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _norm(sizes: GPTSizes, width: int) -> nn.Module:
    return nn.LayerNorm(width) if sizes.biased else nn.RMSNorm(width, eps=1e-5)


def _into_residual(sizes: GPTSizes, width: int) -> nn.Linear:
    """Return a product whose outcome is added up over the layers, and therefore starts smaller."""
    linear = nn.Linear(width, sizes.hidden, bias=sizes.biased)
    linear.initial_std = _STD / (2 * sizes.num_layers) ** 0.5
    return linear
