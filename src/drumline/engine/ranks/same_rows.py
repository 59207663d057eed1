"""Lines along tp and cp must get the same rows, because each computes a part of every one of them."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import torch

from drumline.channel.lines.axes import Axes
from drumline.core.errors import MismatchError
from drumline.engine.ranks.agreement import Given

_SHARED = {"tp": "hold parts of the same layers", "cp": "see parts of the same sequences"}


def agree_on_rows(axes: Axes, axis: str, given: Given, step: int, device: torch.device) -> None:
    """Raise on all lines along tp or cp unless they got the same batch and target, where they got any."""
    own = torch.tensor([_digest(given.batch), _digest(given.target)], dtype=torch.int64, device=device)
    every = [one.tolist() for one in axes.gathered(own, axis)]
    ranks = axes.members(axis)
    for at, what in enumerate(("batch", "target")):
        told = [(rank, one[at]) for rank, one in zip(ranks, every, strict=True) if one[at]]
        for rank, digest in told[1:]:
            if digest != told[0][1]:
                first, other = axes.named(told[0][0]), axes.named(rank)
                raise MismatchError(
                    f"step {step}: {first} and {other}, which {_SHARED[axis]} "
                    f"({axis}), got different {what}{'es' if what == 'batch' else 's'}",
                    expected=f"the same {what} on both",
                    fix=f"choose rows by pipe.axes.rows, which is the same for all lines along {axis}",
                )


def _digest(prints: tuple[Any, ...]) -> int:
    """Return a number for a fingerprint, 0 for nothing.

    >>> _digest(()), _digest((("torch.float32", (4, 2), b""),)) > 0
    (0, True)
    """
    return int.from_bytes(blake2b(repr(prints).encode(), digest_size=7).digest(), "little") + 1 if prints else 0
