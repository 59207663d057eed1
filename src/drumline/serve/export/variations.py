"""Inputs that differ from row to row, made from those of an example: other numbers, random masks, permuted rows.

Rows of an example may repeat. A model that mixes rows, by the mean over its tokens or by its longest row, gives the
same answer for equal rows alone and together. So every number changes, and stays between the example's own.

Other models mix rows only if many are equal: an expert that has room for so many tokens leaves out the last ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

Inputs = dict[str, torch.Tensor]
_CHANGE = 0.5  # by which floating-point numbers change at most, relative to themselves


def variations(example: Inputs, seed: int) -> Iterator[Inputs]:
    """Yield inputs like an example's, the most different ones first, and the example last."""
    for change in (_drawn, _picked, _permuted):
        generator = torch.Generator().manual_seed(seed)
        yield {name: _changed(tensor, change, generator) for name, tensor in example.items()}
    yield example


def alike(example: Inputs) -> Inputs:
    """Return inputs whose rows are all equal, and of whole numbers all numbers of an input.

    >>> alike({"x": torch.tensor([[1, 3], [2, 0]])})["x"].tolist()
    [[3, 3], [3, 3]]
    """
    return {name: _all_alike(tensor) if tensor.numel() else tensor for name, tensor in example.items()}


def _all_alike(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point():
        return tensor[:1].expand_as(tensor).contiguous()
    return torch.full_like(tensor, tensor.max().item())


def _changed(
    tensor: torch.Tensor, change: Callable[[torch.Tensor, torch.Generator], torch.Tensor], generator: torch.Generator
) -> torch.Tensor:
    if tensor.is_floating_point():
        factors = 1 + _CHANGE * (2 * torch.rand(tensor.shape, generator=generator) - 1)
        return tensor * factors.to(tensor.dtype)
    return change(tensor, generator) if tensor.numel() else tensor


def _drawn(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return any whole numbers between the example's; of a mask, which may be all ones, zeros and ones.

    >>> _drawn(torch.full((1, 64), 7), torch.Generator().manual_seed(0)).unique().tolist()
    [1, 2, 3, 4, 5, 6, 7]
    """
    if tensor.dtype is torch.bool:
        return torch.randint(2, tensor.shape, generator=generator).bool()
    least, most = int(tensor.min()), int(tensor.max())
    least = 0 if (least, most) == (1, 1) and tensor.dim() > 1 else min(1, least)
    return torch.randint(least, most + 1, tensor.shape, generator=generator).to(tensor.dtype)


def _picked(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return numbers of the example in any place."""
    flat = tensor.flatten()
    return flat[torch.randint(len(flat), (len(flat),), generator=generator)].view(tensor.shape)


def _permuted(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return the example with rows in another order, and the numbers of each row too."""
    rows = tensor[torch.randperm(len(tensor), generator=generator)]
    if tensor.dim() < 2:
        return rows
    order = torch.rand(tensor.shape[:2], generator=generator).argsort(1)
    return torch.stack([row[at] for row, at in zip(rows, order, strict=True)])
