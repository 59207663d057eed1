"""A batch cut into microbatches, and how much each counts in the loss.

Rows are dealt as evenly as they go, the larger microbatches first: 7 rows in 4 are 2, 2, 2, 1. A mean over the batch is
then the mean of the microbatches' means, each weighted by its rows; a loss that averages over something else (tokens
that count) brings its own weights.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from drumline.core.errors import BatchError, counted
from drumline.runtime.values import pack, unpack


def cut(batch: Any, num_microbatches: int, *, what: str = "the batch") -> list[Any]:
    """Return the microbatches of `batch`: every tensor in it is cut along its first dimension, the rest is repeated.

    >>> import torch
    >>> [one.tolist() for one in cut(torch.arange(7), 4)]
    [[0, 1], [2, 3], [4, 5], [6]]
    """
    tensors, form = pack(batch)
    rows = num_rows(batch, what=what)
    if rows < num_microbatches:
        raise BatchError(
            f"{what} has {counted(rows, 'row')} for {counted(num_microbatches, 'microbatch')}",
            expected="at least one row in every microbatch",
            fix=f"use num_microbatches={rows} or fewer" if rows else "do not pass empty batches",
        )
    pieces = [tensor.tensor_split(num_microbatches) for tensor in tensors]
    if form is None:
        return list(pieces[0])
    return [unpack(one, form) for one in zip(*pieces, strict=True)]


def num_rows(batch: Any, *, what: str = "the batch") -> int:
    """Return how many rows the batch has.

    >>> import torch
    >>> num_rows((torch.ones(3, 2), torch.ones(3)))
    3
    """
    tensors, _ = pack(batch)
    if not tensors:
        raise BatchError(f"{what} holds no tensor", expected="tensors whose first dimension is the batch")
    for tensor in tensors:
        if tensor.dim() == 0 or tensor.shape[0] != tensors[0].shape[0]:
            shapes = ", ".join(str(tuple(one.shape)) for one in tensors)
            raise BatchError(
                f"{what} holds tensors of the shapes {shapes}", expected="the same first dimension in all of them"
            )
    return int(tensors[0].shape[0])


def counted_in(batch: Any) -> tuple[int, int]:
    """Return how many rows and how many tokens a batch has; 0 where there is none, or no tokens.

    >>> import torch
    >>> counted_in(torch.zeros(4, 8, dtype=torch.long)), counted_in(torch.zeros(4, 8)), counted_in(None)
    ((4, 32), (4, 0), (0, 0))
    """
    if batch is None:
        return 0, 0
    first = pack(batch)[0][0]
    is_text = first.dim() == 2 and not first.is_floating_point() and not first.is_complex()
    return int(first.shape[0]), first.numel() if is_text else 0


def shares(weights: list[float | Tensor]) -> list[float | Tensor]:
    """Return what part of the whole each microbatch counts for.

    >>> shares([2, 2, 2, 1])[0] == 2 / 7
    True
    """
    total = sum(weights[1:], start=weights[0])
    if not isinstance(total, Tensor) and not total > 0:
        raise BatchError(
            f"the microbatches' loss weights are {weights}", expected="numbers of 0 or more, not all of them 0"
        )
    return [weight / total for weight in weights]
