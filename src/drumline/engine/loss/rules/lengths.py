"""Whether a loss is a mean over elements or over rows, which only other lengths can tell.

::

    full    (rows, 8 places)    gradient g at the first four places
    short   (rows, 4 places)    a mean over elements: 2 g there; a mean over rows, or a sum: g
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drumline.engine.loss.rules.loss_draws import LossDraws
from drumline.engine.loss.rules.rules import ROWS, SIZE
from drumline.engine.loss.rules.sides import LossShare, Side, side_of
from drumline.engine.loss.rules.tallies import counted_in, tallies_of
from drumline.model.values import mapped, pack
from drumline.model.watch.keeping import undisturbed

NOTHING = "nothing"  # it has no gradient here, and loses nothing whatever it averages over
_NEAR = 0.05


class ByLength(NamedTuple):
    """What other lengths tell of a loss: of each part, and of the rest or all of it, ROWS, SIZE, NOTHING, or ""."""

    parts: list[str]
    rest: str
    changed: frozenset[int]  # tallies that are others at another length


def lengths_of(loss_fn: Callable[..., Any], output: Any, target: Any, device: torch.device) -> ByLength | None:
    """Return of each part of a loss, and of all of it, whether it averages over elements or over rows.

    None if the output and the target have no length in common that can be shortened.
    """
    length = next((tensor.shape[1] for tensor in pack(target)[0] if tensor.dim() > 1), 0)
    if length < 2:
        return None
    short = length // 2
    outputs, targets = ([_dim(tensor, length) for tensor in pack(value)[0]] for value in (output, target))
    if not any(number is not None for number in outputs):
        return None
    wanted = [tensor.is_floating_point() for tensor in pack(output)[0]]
    sides = []
    for each in (length, short):
        arguments = _shortened(output, outputs, each), _shortened(target, targets, each)
        with undisturbed(loss=loss_fn):
            side = side_of(loss_fn, *arguments, wanted, LossDraws(device, everywhere=True).of(0, 1, 1))
        if side is None:
            return None
        sides.append(side)
    full, part = sides
    if full.names != part.names:
        return None
    dims = [dim for dim, wants in zip(outputs, wanted, strict=True) if wants]
    ratio = length / short
    terms = [
        _kind_of_share(term, other, dims, short, ratio) for term, other in zip(full.terms, part.terms, strict=True)
    ]
    rests = [half.rest if half.terms else half.whole for half in (full, part)]
    return ByLength(terms, _kind_of_share(rests[0], rests[1], dims, short, ratio), _changed(full, part))


def _changed(full: Side, part: Side) -> frozenset[int]:
    """Return which tallies count something else in a part."""
    each = [counted_in(side.call, tallies_of(side.call, side.known)) for side in (full, part)]
    pairs = enumerate(zip(*each, strict=False))
    return frozenset(at for at, (pair, other) in pairs if abs(pair - other) > _NEAR * abs(pair))


def alike(output: Any, microbatch: int, targets: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Return a microbatch's output and all targets, cut to the length of the shortest target, if that can be done.

    >>> shortened, cut = alike(torch.ones(2, 5, 3), 0, [torch.ones(2, 5), torch.ones(1, 4)])
    >>> shortened.shape, [tuple(value.shape) for value in cut]
    (torch.Size([2, 4, 3]), [(2, 4), (1, 4)])
    """
    lengths = [next((tensor.shape[1] for tensor in pack(target)[0] if tensor.dim() > 1), 0) for target in targets]
    dims = [_dim(tensor, lengths[microbatch]) for tensor in pack(output)[0]]
    short = min(lengths)
    if short == max(lengths) or None in dims:
        return output, list(targets)
    cut = [
        _shortened(target, [_dim(tensor, length) for tensor in pack(target)[0]], short)
        for target, length in zip(targets, lengths, strict=True)
    ]
    return _shortened(output, dims, short), cut


def _kind_of_share(full: LossShare, part: LossShare, dims: Sequence[int | None], short: int, ratio: float) -> str:
    products = squares = others = 0.0
    for tensor, other, dim in zip(full.gradient, part.gradient, dims, strict=True):
        if tensor is None or other is None:
            continue
        kept_tensor = (tensor if dim is None else tensor.narrow(dim, 0, short)).double()
        products += float((kept_tensor * other.double()).sum())
        squares += float(kept_tensor.square().sum())
        others += float(other.double().square().sum())
    if not squares and not others:
        return NOTHING
    if not squares or not others or products < (1 - _NEAR) * (squares * others) ** 0.5:
        return ""
    ratio_found = products / squares
    return ROWS if abs(ratio_found - 1) < _NEAR else SIZE if abs(ratio_found / ratio - 1) < _NEAR else ""


def _dim(tensor: Tensor, length: int) -> int | None:
    return next((at for at, size in enumerate(tensor.shape) if at and size == length), None)


def _shortened(value: Any, dims: Sequence[int | None], length: int) -> Any:
    each = iter(dims)

    def cut(tensor: Tensor) -> Tensor:
        dim = next(each)
        return (tensor if dim is None else tensor.narrow(dim, 0, length)).detach().clone()

    return mapped(value, cut)
