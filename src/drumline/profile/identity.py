"""Identify a model by its blocks: names, shapes, dtypes, and which parameters train."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from drumline.model.block import Block
from drumline.model.quantised.packed import kind_of, unpacked_shape
from drumline.plan.device.model_profile import Identity


def identity_of(blocks: Sequence[Block], name: str) -> Identity:
    """Return the identity of a model cut into blocks; values and device do not matter.

    >>> from torch import nn
    >>> from drumline.model.block import blocks_of
    >>> value, same, other = (identity_of(blocks_of([nn.Linear(2, width)]), "mine") for width in (3, 3, 4))
    >>> value == same, value == other, value.num_parameters
    (True, False, 9)
    """
    tensors = {id(param): unpacked_shape(param).numel() for block in blocks for param in block.module.parameters()}
    described = [
        [
            block.name,
            [
                [key, list(param.shape), kind_of(param).removeprefix("torch."), param.requires_grad]
                for key, param in block.named_parameters()
            ],
        ]
        for block in blocks
    ]
    return Identity(name, sum(tensors.values()), hashlib.sha256(json.dumps(described).encode()).hexdigest()[:32])
