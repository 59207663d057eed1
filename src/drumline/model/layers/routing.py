"""Sort tokens by the experts that they chose, and put the experts' outputs back in place.

    tokens   0    1    2        each token chose two experts: six pairs
    chosen   2 0  0 1  2 1
    sorted   0: pairs 1, 2    1: pairs 3, 5    2: pairs 0, 4

A pair whose expert is `num_experts` was dropped: it goes nowhere and comes back as zeros. Every pair has one place, so
that all sums run in a fixed order, on accelerators too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_traced(tensor: Tensor) -> bool:
    """Whether a tensor has no data, because the model is being traced."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """The pairs of tokens and chosen experts in order of experts; `counts` says how many each expert has."""

    order: Tensor
    counts: list[int]
    shape: tuple[int, int]  # tokens, and choices of each

    @staticmethod
    def of(index: Tensor, num_experts: int) -> SortedPairs:
        """Sort the pairs of an index of shape (tokens, choices).

        >>> pairs = SortedPairs.of(torch.tensor([[2, 0], [0, 1], [2, 3]]), 3)
        >>> pairs.order.tolist(), pairs.counts
        ([1, 2, 3, 0, 4], [2, 1, 2])
        """
        flat = index.reshape(-1)
        shape = (index.shape[0], index.shape[1])
        if is_traced(index):  # any counts give the right shapes
            each = flat.numel() // num_experts
            return SortedPairs(
                flat.argsort(), [flat.numel() - each * (num_experts - 1)] + [each] * (num_experts - 1), shape
            )
        counts = torch.bincount(flat, minlength=num_experts).tolist()[:num_experts]
        return SortedPairs(flat.argsort(stable=True)[: sum(counts)], counts, shape)

    def rows(self, tokens: Tensor) -> Tensor:
        """Return the tokens of all pairs in order."""
        each = tokens.unsqueeze(1).expand(-1, self.shape[1], -1).reshape(-1, tokens.shape[-1])
        return each.index_select(0, self.order)

    def combined(self, outputs: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """Return each token's weighted sum of what its experts made of it."""
        tokens, choices = self.shape
        placed = outputs.new_zeros((tokens * choices, outputs.shape[-1])).index_copy(0, self.order, outputs)
        return (placed.view(tokens, choices, outputs.shape[-1]) * weights.unsqueeze(-1)).sum(1).to(dtype)


def limited(index: Tensor, num_experts: int, most: int) -> Tensor:
    """Return the index with `num_experts` instead of those pairs that exceed what an expert takes.

    First choices go before second choices, and then earlier tokens before later ones.

    >>> limited(torch.tensor([[0, 1], [0, 1], [1, 0]]), 2, 2)
    tensor([[0, 1],
            [0, 2],
            [1, 2]])
    """
    flat = index.t().reshape(-1)
    order = flat.argsort(stable=True)
    experts = flat[order]
    firsts = torch.searchsorted(experts, torch.arange(num_experts, device=index.device))
    place = torch.arange(len(flat), device=index.device) - firsts[experts]
    kept_tensor = torch.empty_like(flat).index_copy(0, order, torch.where(place < most, experts, num_experts))
    return kept_tensor.view(index.shape[1], index.shape[0]).t().contiguous()
