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


def difference(made: Tensor | None, wanted: Tensor | None, least: float = 0.0) -> float:
    """Return ||made - wanted|| / ||wanted||: 0 only if all bits agree, 1 if one is missing.

    A smaller ||wanted|| than `least` counts as that.

    >>> difference(torch.tensor([3.0, 4.1]), torch.tensor([3.0, 4.0]))
    0.0199...
    >>> difference(None, torch.ones(2)), difference(torch.tensor(math.nan), torch.ones(()))
    (1.0, inf)
    """
    if made is None or wanted is None:
        return 0.0 if made is wanted else 1.0
    if torch.equal(made, wanted):
        return 0.0
    apart = norm_of(made.to(_widest(made)) - wanted.to(_widest(wanted)))
    return _ratio(apart, max(norm_of(wanted), least))


def _ratio(apart: float, size: float) -> float:
    ratio = apart / size if size else apart
    return ratio if math.isfinite(ratio) else math.inf


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
    return 0.0 if apart <= floor else _ratio(apart, size)


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
    return max((off(tensor, other) for tensor, other in pairs if tensor.is_floating_point()), default=0.0)
