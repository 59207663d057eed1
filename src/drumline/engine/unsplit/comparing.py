"""How far tensors are from those of the unsplit model: for `verify` to the last bit, for the check up to rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drumline.model.values import pack


def norm_of(tensor: Tensor | None) -> float:
    """Return a tensor's norm, added up in float64; of nothing it is 0.

    >>> norm_of(torch.tensor([3.0, 4.0])), norm_of(torch.tensor([3.0 + 4.0j])), norm_of(None)
    (5.0, 5.0, 0.0)
    """
    if tensor is None:
        return 0.0
    return float(torch.linalg.vector_norm(_wide(tensor), dtype=_widest(tensor)))


def _widest(tensor: Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def difference(value: Tensor | None, wanted: Tensor | None, least: float = 0.0) -> float:
    """Return ||value - wanted|| / ||wanted||: 0 only if all bits agree, 1 if one is missing.

    A smaller ||wanted|| than `least` counts as that.

    >>> difference(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0]))
    0.0199...
    >>> difference(None, torch.ones(2)), difference(torch.tensor(math.nan), torch.ones(()))
    (1.0, inf)
    """
    if value is None or wanted is None:
        return 0.0 if value is wanted else 1.0
    if torch.equal(value, wanted):
        return 0.0
    distance = norm_of(value.to(_widest(value)) - wanted.to(_widest(wanted)))
    return _ratio(distance, max(norm_of(wanted), least))


def _ratio(distance: float, size: float) -> float:
    ratio = distance / size if size else distance
    return ratio if math.isfinite(ratio) else math.inf


def off(value: Tensor | None, wanted: Tensor | None, *, floor: float = 0.0) -> float:
    """Return ||value - wanted|| as a part of ||wanted||; nothing counts as zeros, and what is below the floor as equal.

    >>> off(torch.tensor([1.1]), torch.tensor([1.0])), off(None, torch.zeros(2)), off(None, torch.ones(1))
    (0.1000..., 0.0, 1.0)
    """
    value, wanted = _dense(value), _dense(wanted)
    if value is None or wanted is None:
        distance = norm_of(value if wanted is None else wanted)
        size = distance
    elif value.shape != wanted.shape:
        return math.inf
    else:
        wanted = wanted.to(value.device)  # a witness keeps gradients on the host
        if value is wanted or (value.dtype == wanted.dtype and torch.equal(value, wanted)):
            return 0.0
        distance, size = norm_of(_wide(value) - _wide(wanted)), norm_of(wanted)
        if not math.isfinite(distance + size) and _same_nans(value, wanted):
            return 0.0  # what is not finite is looked for elsewhere
    return 0.0 if distance <= floor else _ratio(distance, size)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return tensor if tensor is None or tensor.layout is torch.strided else tensor.to_dense()


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype.itemsize > 2 else tensor.float()


def _same_nans(value: Tensor, wanted: Tensor) -> bool:
    return bool((value.isnan() == wanted.isnan()).all()) and not bool(wanted.isfinite().all())


def outputs_off(value: Any, wanted: Any) -> float:
    """Return the largest difference of two outputs' tensors; of dicts, what both have."""
    if isinstance(value, Mapping) and isinstance(wanted, Mapping):
        return max((outputs_off(value[key], wanted[key]) for key in value if key in wanted), default=0.0)
    pairs = zip(pack(value)[0], pack(wanted)[0], strict=False)
    return max((off(tensor, other) for tensor, other in pairs if tensor.is_floating_point()), default=0.0)
