"""A model without memory brought to life: all of it in one process, or what some ranks hold of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.core.placement import Placement
from drumline.pipeline.assembly import device_of
from drumline.runtime.blocks.cut import Block, blocks_of
from drumline.runtime.weights import materialise as runtime
from drumline.runtime.weights.files import Weights as Weights

M = TypeVar("M")


def materialise(
    model: M, weights: str | Path | Weights | None = None, *, device: torch.device | str | None = None, seed: int = 0
) -> M:
    """Give a model on the meta device memory and values, in place, and return it: the whole of it, in this process.

    The values are those that a `Pipeline` with the same `weights` and `seed` gives to its stages, to the last bit. See
    `Weights` for what `weights` may be; without, every module's own initialiser runs, seeded by (seed, module name).

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> materialise(model)[0].weight.device
    device(type='cpu')
    """
    where = device_of(model) if device is None else torch.device(device)
    blocks = [Block("", model, "")] if isinstance(model, nn.Module) else blocks_of(model)  # type: ignore[arg-type]
    runtime.materialise(blocks, blocks, root=root_of(model), weights=opened(weights), device=where, seed=seed)
    for block in blocks:
        block.module.to(where)
    return model


def materialise_stages(
    cuts: Sequence[Sequence[Block]],
    placement: Placement,
    ranks: Sequence[int],
    model: object,
    weights: Weights | None,
    device: torch.device,
    seed: int,
) -> None:
    """Give memory and values to the stages of some ranks."""
    held = sorted({stage for rank in ranks for stage in placement.stages_of(rank)})
    runtime.materialise(
        [block for stage in cuts for block in stage],
        [block for stage in held for block in cuts[stage]],
        root=root_of(model),
        weights=weights,
        device=device,
        seed=seed,
    )


def root_of(model: object) -> nn.Module | None:
    """Return the module that the blocks were cut from, unless they were given by themselves."""
    return model if isinstance(model, nn.Module) else None


def opened(weights: str | Path | Weights | None) -> Weights | None:
    """Return the weights of a path, read no further than their names and shapes."""
    if weights is None or isinstance(weights, Weights):
        return weights
    if not isinstance(weights, str | Path):
        raise ModelError(f"weights is a {type(weights).__name__}", expected="a folder, a file, or dl.Weights")
    return Weights(weights)
