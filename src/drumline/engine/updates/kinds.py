"""What kinds of optimizers may see: any part of a parameter, or only whole matrices."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

# Optimizers of torch that treat every element alike, so that they can update any part of a parameter.
_BY_ELEMENT = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


def by_element(kind: type[Optimizer]) -> bool:
    """Whether an optimizer updates each element by itself; a class that is not torch's own may not.

    >>> by_element(torch.optim.AdamW), by_element(torch.optim.Adafactor)
    (True, False)
    """
    return kind in _BY_ELEMENT
