"""How far tensors are apart: here, or as a few numbers that stand for them where each rank has part of a sum.

The numbers add up as the tensors do: the sum of two tensors' numbers is that of their sum. Each is a product with a
random vector, so it is off by about the norm of what the tensor is off by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from drumline.model.values import pack

_WIDTH = 1021  # a prime, so that columns of no matrix fall together
NUM_NUMBERS = 4


def few(sketched: Tensor) -> list[float]:
    """Return the few numbers of a tensor's sketch.

    >>> one, other = torch.ones(3000), torch.arange(3000.0)
    >>> both = [a + b for a, b in zip(few(one), few(other), strict=True)]
    >>> all(abs(a - b) < 1e-6 for a, b in zip(both, few(one + other), strict=True))
    True
    """
    flat = sketched.to("cpu", torch.float64)
    rows = -(-flat.numel() // _WIDTH)
    padded = torch.nn.functional.pad(flat, (0, rows * _WIDTH - flat.numel())).view(rows, _WIDTH)
    return [float(one) for one in ((padded @ _numbers(_WIDTH, 0)) * _numbers(rows, 1)).sum(0)]


@cache
def _numbers(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, NUM_NUMBERS, generator=generator, dtype=torch.float64)


def norm_of(tensor: Tensor | None) -> float:
    """Return a tensor's norm, added up in float64; of nothing it is 0.

    >>> norm_of(torch.tensor([3.0, 4.0])), norm_of(torch.tensor([3.0 + 4.0j])), norm_of(None)
    (5.0, 5.0, 0.0)
    """
    if tensor is None:
        return 0.0
    wide = torch.complex128 if tensor.is_complex() else torch.float64
    return float(torch.linalg.vector_norm(_wide(tensor), dtype=wide))


def off(made: Tensor | None, wanted: Tensor | None, *, floor: float = 0.0) -> float:
    """Return ||made - wanted|| as a part of ||wanted||; nothing counts as zeros, and what is below the floor as equal.

    >>> off(torch.tensor([1.1]), torch.tensor([1.0])), off(None, torch.zeros(2)), off(None, torch.ones(1))
    (0.1000..., 0.0, 1.0)
    """
    made, wanted = _dense(made), _dense(wanted)
    if made is None or wanted is None:
        apart = norm_of(made if wanted is None else wanted)
        size = apart
    elif made.shape != wanted.shape:
        return math.inf
    else:
        wanted = wanted.to(made.device)  # a witness keeps gradients on the host
        if made is wanted or (made.dtype == wanted.dtype and torch.equal(made, wanted)):
            return 0.0
        apart, size = norm_of(_wide(made) - _wide(wanted)), norm_of(wanted)
        if not math.isfinite(apart + size) and _same_nans(made, wanted):
            return 0.0  # what is not finite is looked for elsewhere
    if not math.isfinite(apart):
        return math.inf
    return 0.0 if apart <= floor else apart / size if size else apart


def _dense(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.layout is torch.strided else tensor.to_dense()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize > 2 else tensor.float()


def _same_nans(made: Tensor, wanted: Tensor) -> bool:
    return bool((made.isnan() == wanted.isnan()).all()) and not bool(wanted.isfinite().all())


def outputs_off(made: Any, wanted: Any) -> float:
    """Return the largest difference of two outputs' tensors; of dicts, what both have."""
    if isinstance(made, Mapping) and isinstance(wanted, Mapping):
        return max((outputs_off(made[key], wanted[key]) for key in made if key in wanted), default=0.0)
    pairs = zip(pack(made)[0], pack(wanted)[0], strict=False)
    return max((off(one, other) for one, other in pairs if one.is_floating_point()), default=0.0)
