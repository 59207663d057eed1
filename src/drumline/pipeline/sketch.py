"""A few numbers that stand for a tensor and add up as the tensors do.

Ranks that each hold part of a sum compare it without sending it: the sketches' sum is the sum's sketch. Each number is
a product with a random vector, so it is off by about the norm of what the tensor is off by.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

_WIDTH = 1021  # a prime, so that columns of no matrix fall together
NUM_NUMBERS = 4


def sketch(tensor: Tensor) -> list[float]:
    """Return the tensor's numbers.

    >>> one, other = torch.ones(3000), torch.arange(3000.0)
    >>> [round(a + b - c, 3) for a, b, c in zip(sketch(one), sketch(other), sketch(one + other), strict=True)]
    [0.0, 0.0, 0.0, 0.0]
    """
    flat = tensor.detach().to("cpu", torch.float64).reshape(-1)
    rows = -(-flat.numel() // _WIDTH)
    padded = torch.nn.functional.pad(flat, (0, rows * _WIDTH - flat.numel())).view(rows, _WIDTH)
    return [float(one) for one in ((padded @ _numbers(_WIDTH, 0)) * _numbers(rows, 1)).sum(0)]


@cache
def _numbers(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, NUM_NUMBERS, generator=generator, dtype=torch.float64)
