"""The bytes that optimizers keep for a parameter: found by letting them step on one of its shape without memory."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.precision import LOW

_IN_ONE_KERNEL = ("foreach", "fused", "capturable")


def state_bytes(kind: Any, settings: Mapping[str, Any], parameter: Tensor, *, masters: bool = False) -> int:
    """Return the bytes that an optimizer of a class keeps for a parameter once it has stepped, a float32 copy included.

    >>> weight = nn.Parameter(torch.empty(100, 10))
    >>> [state_bytes(value, {}, weight) // 1000 for value in (torch.optim.AdamW, torch.optim.Muon, torch.optim.SGD)]
    [8, 4, 0]
    >>> state_bytes(torch.optim.SGD, {"momentum": 0.9}, weight.bfloat16(), masters=True)
    8000
    """
    copied = masters and parameter.dtype in LOW
    dtype = torch.float32 if copied else parameter.dtype
    own_bytes = _state_bytes(kind, json.dumps(dict(settings)), tuple(parameter.shape), dtype)
    return own_bytes + (4 * parameter.numel() if copied else 0)


@cache
def _state_bytes(kind: Any, settings: str, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    try:
        return _stepped(kind, json.loads(settings), torch.empty(shape, dtype=dtype, device="meta"))
    except RuntimeError:  # of the few that look at values
        return _stepped(kind, json.loads(settings), torch.zeros(shape, dtype=dtype))


def _stepped(kind: Any, settings: Mapping[str, Any], values: Tensor) -> int:
    takes = inspect.signature(kind.__init__).parameters
    one_by_one = {name: False for name in _IN_ONE_KERNEL if name in takes}
    parameter = nn.Parameter(values)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = kind([parameter], **{**settings, **one_by_one})
    optimizer.step()
    return sum(tensor.nbytes for tensor in optimizer.state[parameter].values() if isinstance(tensor, Tensor))
