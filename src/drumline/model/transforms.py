"""Whether code runs inside of one of torch's function transforms."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

_interpreter: Any = torch._C._functorch.peek_interpreter_stack


def transformed() -> bool:
    """Whether this runs inside a function transform (torch.func), or with forward derivatives.

    >>> torch.func.vmap(lambda x: x * transformed())(torch.ones(2)), transformed()
    (tensor([1., 1.]), False)
    """
    return forward_ad._current_level >= 0 or _interpreter() is not None
