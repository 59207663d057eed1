"""Give a model on the meta device memory and values, in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.engine.stages.assembly import device_of
from drumline.model.block import Block, blocks_of
from drumline.model.quantised.placing import to_device
from drumline.model.weights import materialise as runtime
from drumline.model.weights.files import Weights as Weights

M = TypeVar("M")


def materialise(
    model: M, weights: str | Path | Weights | None = None, *, device: torch.device | str | None = None, seed: int = 0
) -> M:
    """Give a whole model on the meta device memory and values, in place and in this process, and return it.

    A `Pipeline` with the same `weights` and `seed` gives its stages the same values, bit for bit. See `Weights` for
    what `weights` may be. Without it, each module's own initialiser runs, seeded by (seed, module name).

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> materialise(model)[0].weight.device
    device(type='cpu')
    """
    where = device_of(model) if device is None else torch.device(device)
    root = model if isinstance(model, nn.Module) else None
    blocks = [Block("", root, "")] if root is not None else blocks_of(model)  # type: ignore[arg-type]
    runtime.materialise(blocks, blocks, root=root, weights=opened(weights), device=where, seed=seed)
    for block in blocks:
        to_device(block.module, where)
    return model


def opened(weights: str | Path | Weights | None) -> Weights | None:
    """Return the weights at a path, reading only their names and shapes."""
    if weights is None or isinstance(weights, Weights):
        return weights
    if not isinstance(weights, str | Path):
        raise ModelError(f"weights is a {type(weights).__name__}", expected="a folder, a file, or dl.Weights")
    return Weights(weights)
