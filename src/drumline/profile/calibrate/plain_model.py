"""The plain model whose step is forecast: a decoder as most are written in PyTorch, with nothing compiled.

Norms are `rms_norm`, positions rotate halves of every head, attention is `scaled_dot_product_attention`, and the
feed-forward block is gated by SiLU. Products have no biases. `plan.calibrated` lists what its step launches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from drumline.plan.calibrated.setting import LOSS_ROWS
from drumline.plan.cluster.transformer import Transformer

EPSILON = 1e-5
Normalise = Callable[[Tensor, Tensor], Tensor]


def normalised(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the rows divided by the root of their mean square, times the weight.

    >>> normalised(torch.ones(1, 4), torch.ones(4)).round(decimals=3).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    return functional.rms_norm(hidden, weight.shape, weight, EPSILON)


def rotated(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Return queries or keys with their positions.

    >>> rotated(torch.tensor([1.0, 2.0]), torch.zeros(2), torch.ones(2)).tolist()
    [-2.0, 1.0]
    """
    half = heads.shape[-1] // 2
    return heads * cosines + torch.cat((-heads[..., half:], heads[..., :half]), -1) * sines


class PlainAttention(nn.Module):
    """Causal attention, in which several heads may share keys and values."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.width, self.shared = shape.head_width, shape.num_heads // shape.num_key_value_heads
        keys = shape.num_key_value_heads * self.width
        self.queries = nn.Linear(shape.hidden, shape.num_heads * self.width, bias=False)
        self.keys = nn.Linear(shape.hidden, keys, bias=False)
        self.values = nn.Linear(shape.hidden, keys, bias=False)
        self.output = nn.Linear(shape.num_heads * self.width, shape.hidden, bias=False)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return what the tokens take from those before them."""
        rows, length, _ = hidden.shape
        queries = self.queries(hidden).view(rows, length, -1, self.width).transpose(1, 2)
        keys = self.keys(hidden).view(rows, length, -1, self.width).transpose(1, 2)
        values = self.values(hidden).view(rows, length, -1, self.width).transpose(1, 2)
        queries = rotated(queries, cosines, sines)
        keys = rotated(keys, cosines, sines)
        repeats = self.shared > 1 and hidden.dtype == torch.float32  # fused kernels of float32 know no shared keys
        if repeats:
            keys, values = self._repeated(keys), self._repeated(values)
        heads = functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=True, enable_gqa=self.shared > 1 and not repeats
        )
        return self.output(heads.transpose(1, 2).reshape(rows, length, -1))  # type: ignore[no-any-return]

    def _repeated(self, heads: Tensor) -> Tensor:
        rows, number, length, width = heads.shape
        wide = heads[:, :, None].expand(rows, number, self.shared, length, width)
        return wide.reshape(rows, number * self.shared, length, width).contiguous()  # a view of one head


class GatedFeedForward(nn.Module):
    """The gated feed-forward block."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.hidden, shape.feedforward, bias=False)
        self.up = nn.Linear(shape.hidden, shape.feedforward, bias=False)
        self.down = nn.Linear(shape.feedforward, shape.hidden, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return what the block adds to the tokens."""
        return self.down(functional.silu(self.gate(hidden)) * self.up(hidden))  # type: ignore[no-any-return]


class PlainLayer(nn.Module):
    """One layer."""

    def __init__(self, shape: Transformer, normalise: Normalise) -> None:
        super().__init__()
        self.normalise = normalise
        self.first, self.second = (nn.Parameter(torch.ones(shape.hidden)) for _ in range(2))
        self.attention, self.feedforward = PlainAttention(shape), GatedFeedForward(shape)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Return the tokens after this layer."""
        hidden = hidden + self.attention(self.normalise(hidden, self.first), cosines, sines)
        return hidden + self.feedforward(self.normalise(hidden, self.second))  # type: ignore[no-any-return]


class FusedLoss(torch.autograd.Function):
    """Cross entropy of a product, some tokens at a time: it makes the gradients in its forward, and keeps no logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss."""
        towards, into = torch.empty_like(hidden), torch.zeros_like(weight)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for first in range(0, len(hidden), LOSS_ROWS):
            piece, labels = hidden[first : first + LOSS_ROWS], target[first : first + LOSS_ROWS]
            shares = functional.log_softmax((piece @ weight.t()).float(), -1)
            loss += functional.nll_loss(shares, labels, reduction="sum")
            shares.exp_()
            shares.scatter_add_(1, labels[:, None], shares.new_full((len(piece), 1), -1.0))
            gradient = shares.div_(len(hidden)).to(hidden.dtype)
            del shares
            torch.mm(gradient, weight, out=towards[first : first + LOSS_ROWS])
            into.addmm_(gradient.t(), piece)
            del gradient
        ctx.save_for_backward(towards, into)
        return loss / len(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Return the gradients, times that of the loss."""
        towards, into = ctx.saved_tensors
        return towards * gradients[0], into * gradients[0], None


class PlainModel(nn.Module):
    """Layers between an embedding and a head, and the loss of the next tokens."""

    def __init__(
        self, shape: Transformer, *, loss: str = "plain", recompute: str = "none", normalise: Normalise = normalised
    ) -> None:
        super().__init__()
        self.loss, self.recompute, self.normalise = loss, recompute, normalise
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(PlainLayer(shape, normalise) for _ in range(shape.num_layers))
        self.last = nn.Parameter(torch.ones(shape.hidden))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.embedding.weight
        cosines, sines = _positions(shape.sequence, shape.head_width)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        hidden = self.embedding(tokens)
        for layer in self.layers:
            if self.recompute == "full":
                hidden = checkpoint(
                    layer, hidden, self.cosines, self.sines, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, self.cosines, self.sines)
        hidden = self.normalise(hidden, self.last)
        if self.loss == "fused":
            loss: Tensor = FusedLoss.apply(hidden.flatten(0, 1), self.head.weight, target.flatten())  # type: ignore[no-untyped-call]
            return loss
        return functional.cross_entropy(self.head(hidden).float().flatten(0, 1), target.flatten())


def _positions(length: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions."""
    speeds = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * speeds.repeat(2)
    return angles.cos(), angles.sin()
