"""The rows on which a loss is compared: as many as can be afforded, and parts of them.

An output has its rows along its first dimension, flattened with another one, or along another. Few rows are repeated,
each copy shrunk a little, so that a loss that mixes rows shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drumline.model.values import mapped, pack, unpack

AFFORDABLE = 2**26  # most bytes of outputs that are compared
_SHRUNK = (1.0, 0.875, 0.75)  # what copies of a row are multiplied by, so that no two rows are alike

Places = tuple[tuple[int, int] | None, ...]  # of each tensor: the dimension of its rows and how many belong to one


class TooLarge(Exception):
    """Not even two rows of the output fit the memory that is allowed."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(f"one row of its output has {num_bytes >> 20} MiB")


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of an output and a target, from which parts are taken."""

    output: Any
    target: Any
    rows: int
    outputs: Places
    targets: Places

    def part(self, first: int, end: int) -> tuple[Any, Any]:
        """Return some rows, in the same memory."""
        return _taken(self.output, self.outputs, first, end), _taken(self.target, self.targets, first, end)

    def ordered(self, order: Sequence[int]) -> Rows:
        """Return the same rows in another order."""
        output = _picked(self.output, self.outputs, order)
        return replace(self, output=output, target=_picked(self.target, self.targets, order))

    def full(self) -> Rows:
        """Return the same rows in float32, if they have a lower precision."""
        output, target = (mapped(value, _in_full) for value in (self.output, self.target))
        return replace(self, output=output, target=target)


def chosen_rows(
    output: Any, target: Any, rows: int, attempt: int = 0, *, shrinks: bool = True, most: int | None = None
) -> Rows:
    """Return at least three rows, `most` or as many as can be afforded; few rows are repeated, shrunk a little.

    >>> chosen_rows(torch.ones(1, 2), torch.ones(1), 1).output[:, 0].tolist()
    [1.0, 0.875, 0.75]
    """
    outputs, targets = _places_in(output, target, rows, attempt)
    affordable = _affordable(output, outputs, rows)
    most = min(affordable, max(rows, 3), most or affordable)
    if rows == most:
        return Rows(mapped(output, Tensor.detach), mapped(target, Tensor.detach), rows, outputs, targets)
    if rows > most:
        index = [round(at * (rows - 1) / (most - 1)) for at in range(most)]
    else:
        index = [at % rows for at in range(most)]
    factors = [1.0 if rows > most or not shrinks else _SHRUNK[at // rows % 3] for at in range(most)]
    return Rows(_picked(output, outputs, index, factors), _picked(target, targets, index), most, outputs, targets)


def first_rows(output: Any, target: Any, rows: int) -> Rows:
    """Return the first rows, as many as can be afforded, of an output that keeps its graph."""
    outputs, targets = _places_in(output, target, rows, 0)
    return Rows(output, target, min(_affordable(output, outputs, rows), rows), outputs, targets)


def _affordable(output: Any, places: Places, rows: int) -> int:
    """Return how many rows of an output can be afforded; raise if these are not even two."""
    of_each = sum(tensor.nbytes for tensor, place in zip(pack(output)[0], places, strict=True) if place) // rows
    if 2 * max(of_each, 1) > AFFORDABLE:
        raise TooLarge(of_each)
    return AFFORDABLE // max(of_each, 1)


def resized(output: Any, rows: int, wanted: int) -> Any:
    """Return an output with another number of rows, some of them repeated, and shrunk a little."""
    places = _places(pack(output)[0], rows, 0)
    index, factors = [at % rows for at in range(wanted)], [_SHRUNK[at // rows % 3] for at in range(wanted)]
    return _picked(output, places, index, factors)


def stirred(output: Any, rows: int) -> Any:
    """Return an output whose rows differ more: the numbers of each are moved along its last dimension.

    A loss that picks by its outputs (the largest, those above a bound) then picks otherwise in every row.

    >>> stirred(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]), 2)
    tensor([[1., 2., 3.],
            [3., 1., 2.]])
    """
    tensors, form = pack(output)
    new_tensors = []
    for tensor, place in zip(tensors, _places(tensors, rows, 0), strict=True):
        if place is None or tensor.dim() < 2 or place[0] == tensor.dim() - 1 or not tensor.is_floating_point():
            new_tensors.append(tensor.detach())
            continue
        dim, inside = place
        each = torch.split(tensor.detach(), inside, dim)
        new_tensors.append(torch.cat([part.roll(at, -1) for at, part in enumerate(each)], dim))
    return unpack(new_tensors, form)


def with_all(output: Any, rows: int, targets: Sequence[Any], each: Sequence[int]) -> tuple[Any, Any, int] | None:
    """Return rows of several microbatches' targets, as many as can be afforded, with as many rows of one's output.

    None if their targets cannot be joined.
    """
    packed = [pack(row) for row in targets]
    of_each = sum(row.nbytes for row in pack(output)[0]) // rows
    most = min(max(AFFORDABLE // max(of_each, 1), 2), sum(each))
    index = torch.tensor([at * sum(each) // most for at in range(most)])
    tensors = []
    try:
        for column in zip(*(tensors for tensors, _ in packed), strict=True):
            has_rows = [row.dim() > 0 and row.shape[0] == num for row, num in zip(column, each, strict=True)]
            joint = torch.cat(list(column)) if all(has_rows) else column[0]
            tensors.append(joint.index_select(0, index.to(joint.device)) if all(has_rows) else joint)
    except (RuntimeError, ValueError):
        return None
    return resized(output, rows, most), unpack(tensors, packed[0][1]), most


def _places_in(output: Any, target: Any, rows: int, attempt: int) -> tuple[Places, Places]:
    targets = tuple((0, 1) if tensor.dim() and tensor.shape[0] == rows else None for tensor in pack(target)[0])
    return _places(pack(output)[0], rows, attempt), targets


def _places(tensors: Sequence[Tensor], rows: int, attempt: int) -> Places:
    places: list[tuple[int, int] | None] = []
    for tensor in tensors:
        likely = [(at, 1) for at, size in enumerate(tensor.shape) if size == rows]
        if tensor.dim() and tensor.shape[0] == rows:
            likely = [(0, 1)]
        elif tensor.dim() and tensor.shape[0] and tensor.shape[0] % rows == 0:
            likely.append((0, tensor.shape[0] // rows))
        places.append(likely[min(attempt, len(likely) - 1)] if likely else None)
    return tuple(places)


def num_attempts(output: Any, rows: int) -> int:
    """Return how many dimensions of an output could be that of rows."""
    tensors = pack(output)[0]
    return len(dict.fromkeys(_places(tensors, rows, attempt) for attempt in range(3)))


def _picked(value: Any, places: Places, index: Sequence[int], factors: Sequence[float] = ()) -> Any:
    tensors, form = pack(value)
    new_tensors = []
    for tensor, place in zip(tensors, places, strict=True):
        if place is None:
            new_tensors.append(tensor.detach())
            continue
        dim, inside = place
        at = [row * inside + each for row in index for each in range(inside)]
        rows = tensor.detach().index_select(dim, torch.tensor(at, device=tensor.device))
        if tensor.is_floating_point() and any(factor != 1.0 for factor in factors):
            each = torch.tensor([factor for factor in factors for _ in range(inside)], dtype=tensor.dtype)
            shape = [-1 if at == dim else 1 for at in range(tensor.dim())]
            rows = rows * each.to(tensor.device).view(shape)
        new_tensors.append(rows)
    return unpack(new_tensors, form)


def _in_full(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _taken(value: Any, places: Places, first: int, end: int) -> Any:
    tensors, form = pack(value)
    new_tensors = []
    for tensor, place in zip(tensors, places, strict=True):
        rows = tensor if place is None else tensor.narrow(place[0], first * place[1], (end - first) * place[1])
        new_tensors.append(rows.detach())
    return unpack(new_tensors, form)
