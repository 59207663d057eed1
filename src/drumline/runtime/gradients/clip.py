"""Check gradients at the end of a step: their global norm, and whether they are finite.

The per-parameter norms of all ranks are reduced in the order of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import UsageError


def check(max_norm: Any, norm_type: Any) -> None:
    """Refuse values that are not a norm.

    >>> check(-1.0, 2.0)
    Traceback (most recent call last):
    drumline.core.errors.UsageError: max_norm is -1.0; expected a number of at least 0
    """
    if not isinstance(max_norm, int | float | Tensor) or not max_norm >= 0:
        raise UsageError(f"max_norm is {max_norm!r}", expected="a number of at least 0")
    if not isinstance(norm_type, int | float) or not norm_type > 0:
        raise UsageError(f"norm_type is {norm_type!r}", expected="a positive number, or inf for the largest gradient")


def norms_of(parameters: Iterable[nn.Parameter], norm_type: float) -> list[float | None]:
    """Return each parameter's gradient norm, None if it has no gradient."""
    listed = list(parameters)
    present = [_numbers(param.grad) for param in listed if param.grad is not None]
    norms = iter(
        torch.stack([tensor.to(_norm_type(tensor)) for tensor in torch._foreach_norm(present, norm_type)]).tolist()
        if present
        else []
    )
    return [next(norms) if param.grad is not None else None for param in listed]


def _norm_type(gradient: Tensor) -> torch.dtype:
    return torch.float64 if gradient.dtype is torch.float64 else torch.float32


def _numbers(gradient: Tensor) -> Tensor:
    """Return a gradient; for a sparse one its values, each position once.

    >>> _numbers(torch.tensor([0.0, 3.0]).to_sparse())
    tensor([3.])
    """
    return gradient.coalesce().values() if gradient.layout is torch.sparse_coo else gradient


def total_norm(norms: Sequence[float], norm_type: float, *, is_double: bool = False) -> Tensor:
    """Return the norm of norms, as torch computes it from one model's parameters; `is_double` if any is float64.

    >>> total_norm([3.0, 4.0], 2.0)
    tensor(5.)
    """
    kind = torch.float64 if is_double else torch.float32
    total: Tensor = torch.linalg.vector_norm(torch.tensor(norms, dtype=kind), norm_type)
    return total


def factor(total: Tensor, max_norm: float) -> Tensor:
    """Return what gradients of this norm are multiplied by to have at most `max_norm`, with torch's own formula.

    >>> factor(torch.tensor(4.0), 1.0), factor(torch.tensor(0.5), 1.0)
    (tensor(0.2500), tensor(1.))
    """
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def scale(parameters: Iterable[nn.Parameter], total: Tensor, max_norm: float) -> None:
    """Scale the gradients of parameters down to `max_norm`."""
    multiply([param.grad for param in parameters if param.grad is not None], factor(total, max_norm))


@torch.no_grad()
def multiply(gradients: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply gradients by a factor, in place.

    >>> value = torch.ones(2); multiply([value], 0.5); value
    tensor([0.5000, 0.5000])
    """
    if gradients and isinstance(factor, Tensor):
        factor = factor.to(gradients[0].device)
    dense = [gradient for gradient in gradients if gradient.layout is torch.strided]
    if dense:
        torch._foreach_mul_(dense, factor)
    for gradient in gradients:
        if gradient.layout is not torch.strided:
            gradient.mul_(factor)


def all_finite(tensors: Sequence[Tensor]) -> bool | Tensor:
    """Whether no tensor holds a NaN or an infinity; on an accelerator a tensor, so that nothing waits for it here.

    >>> all_finite([torch.ones(3)]), all_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])
    (True, False)
    >>> all_finite([torch.full((2,), 3e38)])  # although their sum is infinite
    True
    """
    if not tensors:
        return True
    tensors = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
    device = tensors[0].device
    if device.type != "cpu":
        norms = torch._foreach_norm(list(tensors), float("inf"))
        kinds = {norm.dtype for norm in norms}
        return torch.stack(norms if len(kinds) == 1 else [norm.float() for norm in norms]).isfinite().all()
    # On a host, a sum is the cheapest pass that shows any NaN or infinity; if it overflows, check every element.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)
