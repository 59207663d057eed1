"""A sparse mixture of experts as an ordinary module: each token goes through few of many feedforward networks.

    tokens ──► router ──► the top_k experts of each token, and their weights ──► experts ──► weighted sum

The load-balancing loss travels with the activations: a block takes and returns a pair (x, aux). So it reaches the last
stage like any other activation, and its gradient comes back the same way. Every microbatch's loss weight and loss scale
apply to it without further code. The other common way, adding the gradient inside the block, needs to know these
weights before the last stage has seen the microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, UsageError
from drumline.model.layers.routing import SortedPairs, is_traced, limited

Pair = tuple[Tensor, Tensor]


class Experts(nn.Module):
    """The feedforward networks of all experts, as two stacked weights: `w1` (E, ff, h) and `w2` (E, h, ff).

    With `gated`, w1 has twice as many rows: activation(first half) * second half.
    """

    def __init__(
        self,
        hidden: int,
        feedforward: int,
        num_experts: int,
        *,
        activation: Callable[[Tensor], Tensor] = nn.functional.gelu,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.num_experts, self.activation, self.gated = num_experts, activation, gated
        self.w1 = nn.Parameter(torch.empty(num_experts, feedforward * (2 if gated else 1), hidden))
        self.w2 = nn.Parameter(torch.empty(num_experts, hidden, feedforward))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give all weights their first values, as nn.Linear does."""
        for weight in (self.w1, self.w2):
            bound = 1 / math.sqrt(weight.shape[-1])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what the chosen experts make of each token.

        `index` and `weights` have shape (tokens, choices); an index of `num_experts` means no expert.
        """
        pairs = SortedPairs.of(index, self.num_experts)
        rows = torch.split_with_sizes(pairs.rows(tokens), pairs.counts)
        # An expert without tokens takes part too: its gradient is zero, as in one process.
        tensors = [self._expert_output(*each) for each in zip(rows, self.w1.unbind(), self.w2.unbind(), strict=True)]
        return pairs.combined(torch.cat(tensors), weights, tokens.dtype)

    def _expert_output(self, rows: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        inner = nn.functional.linear(rows, w1)
        if self.gated:
            gate, up = inner.chunk(2, -1)
            return nn.functional.linear(self.activation(gate) * up, w2)
        return nn.functional.linear(self.activation(inner), w2)

    def extra_repr(self) -> str:
        """Return what the module's text shows."""
        return f"{self.w1.shape[-1]}, {self.w2.shape[-1]}, num_experts={self.num_experts}, gated={self.gated}"


class MoE(nn.Module):
    """A sparse mixture of experts: a router chooses `top_k` of `num_experts` feedforward networks for each token.

    - `capacity`: None drops nothing. A factor limits each expert to ceil(capacity * tokens * top_k / num_experts) of a
      microbatch; further tokens skip the expert. First choices go first, then earlier tokens.
    - `aux`: return a pair (x, aux), where aux has the load-balancing losses so far: one number for each row of x.
      With or without it, the block accepts such a pair, and passes aux on.
    - `activation`, `gated`: what experts compute between their two weights: activation(w1 x), or with `gated`
      activation(first half) * second half.

    The router's chances are a float32 softmax over all experts. The weights of a token's experts add up to 1 if there
    are several. The load-balancing loss is num_experts * sum(f * p): for each expert, the part f of choices that fell
    on it, times its mean chance p. It is 1 if all experts get the same.

    >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
    <torch._C.Generator ...>
    >>> block = MoE(8, 16, num_experts=4, aux=True)
    >>> x, aux = block(torch.randn(2, 5, 8))
    >>> x.shape, aux.shape
    (torch.Size([2, 5, 8]), torch.Size([2]))
    """

    def __init__(
        self,
        hidden: int,
        feedforward: int,
        num_experts: int,
        top_k: int = 2,
        capacity: float | None = None,
        *,
        aux: bool = False,
        activation: Callable[[Tensor], Tensor] = nn.functional.gelu,
        gated: bool = False,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UsageError(f"top_k is {top_k}", expected=f"1 to {num_experts}, the number of experts")
        if capacity is not None and not capacity > 0:
            raise UsageError(f"capacity is {capacity}", expected="None, or a factor above 0 such as 1.25")
        self.num_experts, self.top_k, self.capacity, self.aux = num_experts, top_k, capacity, aux
        self.router = nn.Linear(hidden, num_experts, bias=False)
        self.experts = Experts(hidden, feedforward, num_experts, activation=activation, gated=gated)
        # Pairs that each expert got since it was last read, and behind them pairs that were dropped.
        self.load: Tensor | None = None

    def forward(self, inputs: Tensor | Pair, aux: Tensor | None = None) -> Any:
        """Return the output for x, or (x, aux); takes a pair as one argument or as two."""
        x, aux = inputs if isinstance(inputs, tuple) else (inputs, aux)
        if x.shape[-1] != self.router.in_features:
            raise ModelError(
                f"the mixture of experts gets a tensor of shape {tuple(x.shape)}",
                expected=f"{self.router.in_features} in the last dimension, as hidden= says",
            )
        tokens = x.reshape(-1, x.shape[-1])
        chances = self.router(tokens).float().softmax(-1)
        weights, index = chances.topk(self.top_k, -1)
        if self.top_k > 1:  # a single weight of 1 would give the router no gradient
            weights = weights / weights.sum(-1, keepdim=True)
        if self.aux:
            own_tensor = self._imbalance(chances, index).expand(x.shape[0])
            aux = own_tensor if aux is None else aux + own_tensor
        kept_tensor = index
        if self.capacity is not None:
            most = math.ceil(self.capacity * index.numel() / self.num_experts)
            kept_tensor = limited(index, self.num_experts, most)
        self._count(kept_tensor)
        output = self.experts(tokens, kept_tensor, weights).view(x.shape)
        return output if aux is None else (output, aux)

    def _imbalance(self, chances: Tensor, index: Tensor) -> Tensor:
        """Return the load-balancing loss of these tokens."""
        chosen = torch.zeros(self.num_experts, device=index.device)
        part = chosen.index_add(0, index.reshape(-1), torch.ones_like(index, dtype=chosen.dtype).reshape(-1))
        return self.num_experts * (part / max(index.numel(), 1) * chances.mean(0)).sum()

    @torch.no_grad()
    def _count(self, kept_choices: Tensor) -> None:
        if self.training and not is_traced(kept_choices):
            counts = torch.bincount(kept_choices.reshape(-1), minlength=self.num_experts + 1)
            self.load = counts if self.load is None else self.load + counts


class PassAux(nn.Module):
    """Applies a module to x of a pair (x, aux), and passes aux on; x alone goes through as it is.

    >>> x, aux = PassAux(nn.Linear(8, 4))((torch.ones(2, 8), torch.zeros(2)))
    >>> x.shape, aux
    (torch.Size([2, 4]), tensor([0., 0.]))
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, inputs: Tensor | Pair, aux: Tensor | None = None) -> Any:
        """Return the module's output, or (output, aux)."""
        x, aux = inputs if isinstance(inputs, tuple) else (inputs, aux)
        module = self.module(x)
        return module if aux is None else (module, aux)
