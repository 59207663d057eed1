"""A model whose gradients are wrong on one line of a mesh, as no model's should be."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * (2 if os.environ.get("RANK") == "1" else 1)


class Doubled(nn.Module):
    """Passes everything on; on rank 1 it doubles gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the same."""
        made: Tensor = _Doubled.apply(x)  # type: ignore[no-untyped-call]
        return made


def wrong_on_one_line() -> tuple[nn.Module, Any, Tensor, Tensor]:
    """Return a chain in which everything before the last block is wrong on rank 1."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Sequential(Doubled(), nn.Linear(4, 4)))
    return model, nn.functional.mse_loss, torch.randn(8, 4), torch.randn(8, 4)
