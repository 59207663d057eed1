"""Models materialised part by part, as ranks would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.block import Block
from drumline.model.weights.files import Weights
from drumline.model.weights.materialise import materialise
from torch_models import CPU, on_meta


def values(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def by_parts(
    make: Callable[[], Any],
    cut: Callable[[Any], Sequence[Block]],
    num_ranks: int,
    weights: Weights | None,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Materialise a model as that many ranks would, each from a model of its own; returns what all of them hold."""
    found: dict[str, Tensor] = {}
    for rank in range(num_ranks):
        model = on_meta(make)
        blocks = list(cut(model))
        start, end = list(pairwise(len(blocks) * number // num_ranks for number in range(num_ranks + 1)))[rank]
        materialise(blocks, blocks[start:end], root=model, weights=weights, device=CPU, seed=seed)
        held = {id(value) for block in blocks[start:end] for value in values(block.module).values()}
        for name, value in values(model).items():
            assert value.is_meta == (id(value) not in held), f"{name} on rank {rank}"
            if id(value) in held:
                assert torch.equal(found.setdefault(name, value), value), f"{name} differs between ranks"
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].requires_grad == tensor.requires_grad
        assert torch.equal(found[name], tensor), name
