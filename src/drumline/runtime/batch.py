"""Split a batch into microbatches, and compute the weight of each in the loss.

Rows are distributed as evenly as possible, the larger microbatches first: 7 rows in 4 are 2, 2, 2, 1. The mean over the
batch is then the mean of the microbatches' means, weighted by their rows. A loss that averages over something else
(tokens that count) brings its own weights.

Not everything is split along its first dimension. Numbers and tensors without rows go whole to all microbatches. So do
tensors with one row among others with more, such as positions of shape (1, length). `split` says the rest. Values that
the user split, `Microbatches`, stay as they are, and tensors beside them are split to the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import BatchError, counted
from drumline.model.microbatches import Microbatches as Microbatches
from drumline.model.values import pack, unpack, unpack_each
from drumline.runtime import user_batch

# For an argument: the dimension of its rows; None to give it whole to all microbatches; or a function of all arguments
# that returns how many of its rows belong to each row of the batch.
How = int | None | Callable[[Mapping[Any, Any]], Any]
Split = Mapping[str | int, How]
Packed = tuple[tuple[Tensor, ...], Any]  # the tensors of a batch, and its form


def cut(batch: Any, num_microbatches: int, *, what: str = "the batch", split: Split | None = None) -> list[Any]:
    """Return the microbatches of `batch`: every tensor is split along its rows, the rest is repeated.

    >>> import torch
    >>> [value.tolist() for value in cut(torch.arange(7), 4)]
    [[0, 1], [2, 3], [4, 5], [6]]
    >>> [x.tolist() for x, _ in cut((torch.arange(4), torch.ones(1, 3)), 2)]
    [[0, 1], [2, 3]]
    """
    return cut_and_counted(batch, num_microbatches, what=what, split=split)[0]


def cut_and_counted(
    batch: Any, num_microbatches: int, *, what: str = "the batch", split: Split | None = None
) -> tuple[list[Any], int]:
    """Return the microbatches of `batch`, and how many rows it has.

    >>> cut_and_counted(torch.zeros(7, 2), 4)[1]
    7
    """
    tensors, form = pack(batch)
    if form is not None and user_batch.is_apart(form):
        return _cut_apart(batch, (tensors, form), num_microbatches, what, split)
    rows = _rows_in(batch, tensors, what, split)
    if rows < num_microbatches:
        raise BatchError(
            f"{what} has {counted(rows, 'row')} for {counted(num_microbatches, 'microbatch')}",
            expected="at least one row per microbatch",
            fix=f"use num_microbatches={rows} or fewer" if rows else "skip empty batches",
        )
    if form is None:
        return list(tensors[0].tensor_split(num_microbatches)), rows
    hows, items = (_hows(batch, split), _items(batch)) if split else ({}, {})
    each = rows_of_each(rows, num_microbatches)
    pieces = [_parts(tensor, hows.get(id(tensor), _BY_ITSELF), each, items, what) for tensor in tensors]
    return unpack_each(pieces, form, num_microbatches), rows


def _cut_apart(
    batch: Any, packed: Packed, num_microbatches: int, what: str, split: Split | None
) -> tuple[list[Any], int]:
    """Return the microbatches of what the user cut, and all rows; tensors beside it get as many rows in each."""
    tensors, form = packed
    forms = user_batch.forms(tensors, form, num_microbatches, what)
    each = rows_apart(batch, split, packed=packed)
    given_apart = user_batch.inside(form)
    if len(given_apart) == len(tensors):
        return [unpack(tensors, shape) for shape in forms], sum(each)
    hows, items = _hows(batch, split), _items(batch)
    pieces = []
    for place, tensor in enumerate(tensors):
        how = hows.get(id(tensor), _BY_ITSELF)
        if place in given_apart:
            pieces.append([tensor] * num_microbatches)
            continue
        if how is _BY_ITSELF and tensor.dim() and tensor.shape[0] not in (1, sum(each)):
            raise BatchError(
                f"{what} has a tensor of the shape {tuple(tensor.shape)} beside Microbatches of {sum(each)} rows",
                expected="as many rows in all, to be cut like these, or one row for all microbatches",
                fix="pass Microbatches for it too, or split={'name': None} to give it whole to each",
            )
        pieces.append(list(_parts(tensor, how, each, items, what)))
    return [unpack(part, shape) for part, shape in zip(zip(*pieces, strict=True), forms, strict=True)], sum(each)


def rows_apart(batch: Any, split: Split | None = None, *, packed: Packed | None = None) -> list[int]:
    """Return how many rows each microbatch has that the user cut.

    >>> rows_apart({"x": Microbatches([torch.ones(2, 7), torch.ones(3, 4)])})
    [2, 3]
    """
    tensors, form = packed or pack(batch)
    hows = _hows(batch, split) if split else {}
    counts = []
    for lead in user_batch.lead_of(tensors, form):
        how = hows.get(id(lead), 0)
        counts.append(1 if lead is None else int(lead.shape[how if isinstance(how, int) else 0]))
    return counts


def num_rows(batch: Any, *, what: str = "the batch", split: Split | None = None) -> int:
    """Return the number of rows in the batch.

    >>> import torch
    >>> num_rows((torch.ones(3, 2), torch.ones(3)))
    3
    """
    tensors, form = pack(batch)
    if form is not None and user_batch.is_apart(form):
        return sum(rows_apart(batch, split))
    return _rows_in(batch, tensors, what, split)


def _rows_in(batch: Any, tensors: Sequence[Tensor], what: str, split: Split | None) -> int:
    """Return the number of rows in a batch with these tensors."""
    if not tensors:
        raise BatchError(f"{what} contains no tensor", expected="tensors whose first dimension is the batch")
    hows = _hows(batch, split) if split else {}
    entries: dict[int, None] = {}
    for tensor in tensors:
        how = hows.get(id(tensor), _BY_ITSELF)
        if how is None or callable(how) or tensor.dim() == 0:
            continue
        at = 0 if how is _BY_ITSELF else how
        if not -tensor.dim() <= at < tensor.dim():
            raise BatchError(
                f"{what} has a tensor of shape {tuple(tensor.shape)}, and split puts its rows along"
                f" dimension {at}, which it lacks"
            )
        entries[int(tensor.shape[at])] = None
    sizes = [size for size in entries if size != 1] or list(entries)
    if len(sizes) != 1:
        shapes = ", ".join(str(tuple(value.shape)) for value in tensors)
        raise BatchError(
            f"{what} contains tensors of shapes {shapes}",
            expected="the same first dimension in all tensors",
            fix="say how to split the others: split={'name': 1} for another dimension, None to pass the tensor whole",
        )
    return sizes[0]


def rows_of_each(rows: int, num_microbatches: int) -> list[int]:
    """Return the number of rows in each microbatch.

    >>> rows_of_each(7, 4)
    [2, 2, 2, 1]
    """
    base, more = divmod(rows, num_microbatches)
    return [base + (at < more) for at in range(num_microbatches)]


_BY_ITSELF: Any = object()  # the default for tensors that split does not name


def _hows(batch: Any, split: Split | None) -> dict[int, How]:
    """Return how to split the tensors that `split` names, by their ids."""
    items, said = _items(batch), split or {}
    for name in said:
        if name not in items and isinstance(name, int):
            raise BatchError(f"split names argument {name}", expected=f"one of {', '.join(map(str, items))}")
    return {id(tensor): said[name] for name, value in items.items() if name in said for tensor in pack(value)[0]}


def _items(batch: Any) -> dict[Any, Any]:
    """Return the items of a batch: arguments by position and name, or the entries of a dict or tuple."""
    args, kwargs = getattr(batch, "args", None), getattr(batch, "kwargs", None)
    if isinstance(args, tuple) and isinstance(kwargs, dict):
        return {**dict(enumerate(args)), **kwargs}
    if isinstance(batch, Mapping):
        return dict(batch)
    return dict(enumerate(batch)) if isinstance(batch, tuple | list) else {}


def _parts(tensor: Tensor, how: How, rows: Sequence[int], items: Mapping[Any, Any], what: str) -> Sequence[Tensor]:
    """Return a tensor's part for each microbatch, which has so many rows."""
    total = sum(rows)
    if how is _BY_ITSELF:
        how = None if tensor.dim() == 0 or (tensor.shape[0] == 1 and total > 1) else 0
    if how is None:
        return [tensor] * len(rows)
    if not callable(how):
        if not -tensor.dim() <= how < tensor.dim() or tensor.shape[how] != total:
            raise BatchError(
                f"{what} has a tensor of the shape {tuple(tensor.shape)}, and split says that its rows are its"
                f" dimension {how}",
                expected=f"{counted(total, 'row')} there",
            )
        return torch.split(tensor, list(rows), dim=how)
    each = torch.as_tensor(how(items)).flatten().tolist()
    if len(each) != total or sum(each) != tensor.shape[0]:
        raise BatchError(
            f"{what} has a packed tensor of shape {tuple(tensor.shape)}, and split counts {sum(each)} in"
            f" {counted(len(each), 'row')}",
            expected=f"{counted(total, 'count')}, one for each row, that sum to {tensor.shape[0]}",
        )
    bounds = [0, *accumulate(rows)]
    return torch.split(tensor, [int(sum(each[start:end])) for start, end in pairwise(bounds)])


def counted_in(batch: Any) -> tuple[int, int]:
    """Return the number of rows and of tokens in a batch; 0 if there are none.

    >>> import torch
    >>> counted_in(torch.zeros(4, 8, dtype=torch.long)), counted_in(torch.zeros(4, 8)), counted_in(None)
    ((4, 32), (4, 0), (0, 0))
    """
    if batch is None:
        return 0, 0
    tensors, form = pack(batch)
    if form is not None and user_batch.is_apart(form):
        firsts = [tensor for tensor in user_batch.lead_of(tensors, form) if tensor is not None]
    else:
        firsts = [tensor for tensor in tensors if tensor.dim()][:1]
    return sum([int(tensor.shape[0]) for tensor in firsts]), sum([value.numel() for value in firsts if _is_text(value)])


def _is_text(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex()
