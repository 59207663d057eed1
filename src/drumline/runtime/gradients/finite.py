"""Whether gradients are finite, at the price of one pass over them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def all_finite(tensors: Sequence[Tensor]) -> bool | Tensor:
    """Whether no tensor holds a NaN or an infinity; on an accelerator a tensor, so that nobody waits for it here.

    >>> all_finite([torch.ones(3)]), all_finite([torch.ones(3), torch.tensor([1.0, float("nan")])])
    (True, False)
    >>> all_finite([torch.full((2,), 3e38)])  # though their sum is not
    True
    """
    if not tensors:
        return True
    tensors = [torch.view_as_real(one) if one.is_complex() else one for one in tensors]
    device = tensors[0].device
    if device.type != "cpu":
        norms = torch._foreach_norm(list(tensors), float("inf"))
        kinds = {norm.dtype for norm in norms}
        return torch.stack(norms if len(kinds) == 1 else [norm.float() for norm in norms]).isfinite().all()
    # On a host a sum is the cheapest pass that no NaN or infinity survives; one that overflows is looked at closely.
    sums = torch.stack([tensor.sum(dtype=torch.float32) for tensor in tensors])
    return bool(sums.isfinite().all()) or all(bool(tensor.isfinite().all()) for tensor in tensors)
