"""Parameters of which every line along an axis holds another part: which part of the whole each of them is.

    q_proj.weight   (64, 32) whole       tp 0: rows 0 to 31       tp 1: rows 32 to 63        Slice("tp", 0)
    qkv.weight      (96, 32) whole       each third of its rows is divided                   Slice("tp", 0, parts=3)
    experts.w1      (4, 64, 32) whole    ep 0: experts 0 and 1    ep 1: experts 2 and 3      Slice("ep", 0)

Names, norms, checkpoints and comparisons are those of the whole; the slice says how to get there and back. It is stored
on the parameter itself, as `parameter.slice`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.core.errors import ModelError


@dataclass(frozen=True, slots=True)
class Slice:
    """A parameter is divided over `axis` along dimension `dim`; each of its `parts` is divided separately."""

    axis: str
    dim: int
    parts: int = 1

    def local(self, whole: Tensor, place: int, size: int) -> Tensor:
        """Return the part of the whole at a place along the axis.

        >>> Slice("tp", 0, parts=2).local(torch.arange(8), 1, 2)
        tensor([2, 3, 6, 7])
        """
        length = whole.shape[self.dim]
        if length % (self.parts * size):
            raise ModelError(
                f"a tensor of shape {tuple(whole.shape)} is divided by {size} ({self.axis}) along dimension {self.dim}",
                expected=f"a multiple of {self.parts * size} there",
                fix=f"choose another size of {self.axis}",
            )
        each = [part.chunk(size, self.dim)[place] for part in whole.chunk(self.parts, self.dim)]
        return each[0].contiguous() if len(each) == 1 else torch.cat(each, self.dim)

    def whole(self, locals_: Sequence[Tensor]) -> Tensor:
        """Return the whole from the parts of all places along the axis, in order.

        >>> value = Slice("tp", 0, parts=2)
        >>> value.whole([value.local(torch.arange(8), place, 2) for place in range(2)])
        tensor([0, 1, 2, 3, 4, 5, 6, 7])
        """
        each = [local.chunk(self.parts, self.dim) for local in locals_]
        return torch.cat([part for parts in zip(*each, strict=True) for part in parts], self.dim)


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """A tensor of `shape` is divided over the lines of `axis` element by element, or belongs to the `owner` alone.

    `inner` is the slice that the divided tensor itself is, if it is one.
    """

    axis: str
    shape: tuple[int, ...]
    owner: int | None = None
    inner: Slice | None = None

    def span(self, place: int, size: int) -> tuple[int, int]:
        """Return the first element at a place along the axis, and the one after its last.

        >>> value = FlatSlice("dp", (3, 3))
        >>> [value.span(place, 2) for place in range(2)]
        [(0, 5), (5, 9)]
        """
        numel = math.prod(self.shape)
        if self.owner is not None:
            return (0, numel) if place == self.owner else (0, 0)
        each = -(-numel // size)
        return min(numel, place * each), min(numel, (place + 1) * each)

    def local(self, whole: Tensor, place: int, size: int) -> Tensor:
        """Return the part of the whole at a place along the axis, flat.

        >>> FlatSlice("dp", (2, 2)).local(torch.arange(4).view(2, 2), 1, 2)
        tensor([2, 3])
        """
        first, last = self.span(place, size)
        return whole.reshape(-1)[first:last]

    def whole(self, locals_: Sequence[Tensor]) -> Tensor:
        """Return the whole from the parts of all places along the axis, in order."""
        return torch.cat(list(locals_)).view(self.shape)


def slice_of(tensor: Tensor) -> Slice | FlatSlice | None:
    """Return which part of a whole tensor a tensor is, None if it is whole.

    >>> slice_of(torch.ones(1)) is None
    True
    """
    found_slice: Slice | FlatSlice | None = getattr(tensor, "slice", None)
    return found_slice


def sharded_over(tensor: Tensor) -> tuple[str, ...]:
    """Return the axes along which lines hold different parts of a tensor."""
    inner, axes = slice_of(tensor), []
    while inner is not None:
        axes.append(inner.axis)
        inner = inner.inner if isinstance(inner, FlatSlice) else None
    return tuple(axes)


def cut_out(whole: Tensor, place: Slice | FlatSlice | None, axes: Axes) -> Tensor:
    """Return this rank's part of a whole tensor; what an owner holds alone stays as it is."""
    if isinstance(place, FlatSlice):
        whole = cut_out(whole, place.inner, axes)
        if place.owner is not None:
            return whole
    return whole if place is None else place.local(whole, axes.place(place.axis), axes.size(place.axis))


def put_together(part: Tensor, place: Slice | FlatSlice | None, axes: Axes) -> Tensor:
    """Return the whole of which this rank holds a part; all ranks along its axes call it alike.

    What an owner holds alone is put together along the other axes only.
    """
    while place is not None:
        if not (isinstance(place, FlatSlice) and place.owner is not None):
            part = place.whole(axes.gathered(part, place.axis))
        place = place.inner if isinstance(place, FlatSlice) else None
    return part


def writes(place: Slice | FlatSlice | None, axes: Axes) -> bool:
    """Whether this rank writes a tensor that it holds or has put together: one rank of the mesh does.

    >>> writes(None, Axes.single(2, rank=1))
    True
    """
    owner = place.owner if isinstance(place, FlatSlice) else None
    if owner is None:
        return axes.number == 0
    others = [name for name in axes.names if name not in ("pp", "dp")]
    return axes.place("dp") == owner and axes.place(*others) == 0
