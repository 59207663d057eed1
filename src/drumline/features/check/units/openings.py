"""The first tokens of sequences, where the model by itself has no memory for whole ones.

    tokens   0 1 2 3 4 5 6 7 8 9 . .      no memory for the model and its gradients
             0 1 2 3 4 5 6 7              its forward alone, on ever fewer tokens
    units    0 1 2 3|4 5 6 7|8 9 . .      as long as more than one unit is seen

No token changes what is computed for those before it, so their outputs must be those of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drumline.model.values import mapped, pack


@dataclass(frozen=True, slots=True)
class Opening:
    """What the model by itself returned for the first tokens of sequences."""

    num_tokens: int
    output: Any


def openings(inputs: Any, num_units: int) -> Iterator[tuple[int, Any]]:
    """Yield numbers of tokens and inputs with so many: all, half of them and so on, while they are in several units.

    >>> import torch
    >>> [(number, value.shape) for number, value in openings(torch.zeros(1, 12), 4)]
    [(12, torch.Size([1, 12])), (6, torch.Size([1, 6]))]
    """
    length = next((tensor.shape[1] for tensor in pack(inputs)[0] if tensor.dim() > 1), 0)
    number = length
    while number * num_units > length:
        yield number, _first(inputs, number, length)
        number //= 2


def _first(inputs: Any, number: int, length: int) -> Any:
    return mapped(inputs, lambda each: each[:, :number] if each.dim() > 1 and each.shape[1] == length else each)
