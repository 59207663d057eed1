"""The sum of a step's losses over the lines of a mesh, in a form on which all lines agree beforehand.

    line 0   microbatches 0 and 1 count labels    0.7  0.2    float32  yes    bfloat16  no
    line 1   microbatch 1 counts none             0.1  0.0    float32  yes    bfloat16  no
    sum                                           0.8  0.2    2               0            a float32

A line that counts no label has a loss of no dtype, and another line may not know that. So every line sends float64
numbers, one of each microbatch, and flags that say which dtypes its losses have. The loss has the dtype that they have
together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import DATA
from drumline.engine.lines import widest

_KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def summed_losses(axes: Axes, parts: Tensor, kinds: Iterable[torch.dtype]) -> Tensor:
    """Return the sums of the microbatches' parts of the loss over all lines that see other tokens.

    `kinds` are the dtypes of the losses that this line has, none if it counts no label. All lines call it alike.

    >>> one = Axes.single(num_ranks=1)
    >>> summed_losses(one, torch.tensor([0.5, 0.0]), [torch.bfloat16]).dtype
    torch.bfloat16
    """
    found = set(kinds)
    if axes.group(*DATA) is None:
        return parts.to(widest(found) or parts.dtype)
    flags = torch.tensor([float(one in found) for one in _KINDS], dtype=torch.float64).to(parts.device)
    total = axes.summed(torch.cat([parts.to(torch.float64), flags]), *DATA)
    told = [kind for kind, flag in zip(_KINDS, total[len(parts) :].tolist(), strict=True) if flag]
    return total[: len(parts)].to(widest(told) or parts.dtype)
