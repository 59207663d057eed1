"""A loss of rows together, beside the losses of the same rows in two parts of different size.

    output rows   0 1 2 3 4 5 6 7        whole
                  0 1 2 | 3 4 5 6 7      parts: do their losses and gradients add up to those of the whole, and how?

The outputs are detached copies, and random draws are equal for the same rows. The function's state is restored, so only
the answer remains.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from drumline.engine.loss.rules.loss_draws import LossDraws
from drumline.engine.loss.rules.rows import Places, Rows, chosen_rows, first_rows
from drumline.engine.loss.rules.sides import LossShare, Side, linked_side_of, norm_of, products, side_of
from drumline.model.values import pack
from drumline.model.watch.keeping import undisturbed

_NEAR = {torch.float64: 1e-7, torch.float32: 1e-4}
_LESS_NEAR, _HALF = 2e-3, 2e-2  # of float32 on an accelerator, and of lower precision


@dataclass(eq=False)
class LossComparison:
    """What was found: the whole, its two parts, and how near they must come."""

    rows: Rows
    bounds: tuple[tuple[int, int], ...]
    whole: Side
    parts: tuple[Side, ...]
    near: float  # of gradients
    near_value: float
    wanted: Places  # of the tensors that have a gradient
    draws: LossDraws
    _fits: dict[tuple[LossShare, int, int], tuple[float, float, float, float]] = field(default_factory=dict)

    @property
    def sizes(self) -> list[int]:
        """The rows of each part."""
        return [end - first for first, end in self.bounds]

    @property
    def is_finite(self) -> bool:
        """Whether the loss of all rows is a number."""
        return self.whole.whole.is_finite

    @property
    def tells(self) -> bool:
        """Whether there is a gradient by which weights can be told."""
        return all(part.whole.norm > 0 for part in (self.whole, *self.parts) if part.whole.is_finite)

    @property
    def has_same_calls(self) -> bool:
        """Whether it makes the same calls whatever the number of rows is."""
        return all(part.call.is_again for part in self.parts)

    @property
    def tells_apart(self) -> bool:
        """Whether all runs have the same parts of the loss."""
        return all(part.names == self.whole.names for part in self.parts)

    def shares(self, part: int | None, *, rest: bool = False) -> list[LossShare]:
        """Return what a part of the loss, or all of it, is in the whole and in the parts."""
        sides = [self.whole, *self.parts]
        return [side.rest if rest else side.whole if part is None else side.terms[part] for side in sides]

    def order(self) -> list[int]:
        """Return the rows by their gradient, the largest first: those first that a loss picks."""
        norms = torch.zeros(self.rows.rows, dtype=torch.float64)
        for tensor, place in zip(self.whole.whole.gradient, self.wanted, strict=True):
            if tensor is not None and place is not None:
                each = tensor.detach().movedim(place[0], 0).reshape(self.rows.rows, -1)
                norms += each.double().square().sum(1).cpu()
        return [int(at) for at in norms.argsort(descending=True)]

    def is_constant(self, shares: Sequence[LossShare]) -> bool:
        """Whether something is the same number in all of them, and has no gradient in the outputs."""
        scale = max(self.whole.whole.norm, *(part.whole.norm for part in self.parts if part.whole.is_finite), 1e-300)
        if any(share.is_finite and share.norm > 3 * self.near * scale for share in shares):
            return False
        values = [share.value for share in shares if math.isfinite(share.value)]
        return max(values) - min(values) <= 3 * self.near_value * max(self._size, 1e-30)

    def fits(self, shares: Sequence[LossShare], weights: Sequence[float]) -> bool:
        """Whether the parts, weighted so, add up to the whole in value and in gradient."""
        whole, *parts = shares
        if not all(part.is_finite or not weight for part, weight in zip(parts, weights, strict=True)):
            return False
        error, norm = self._off(shares, weights)
        value = sum(weight * part.value for part, weight in zip(parts, weights, strict=True) if weight)
        return error <= self.near * norm and abs(value - whole.value) <= self.near_value * max(self._size, 1e-30)

    @cached_property
    def _size(self) -> float:
        return max(part.size for part in (self.whole, *self.parts) if math.isfinite(part.size))

    def _off(self, shares: Sequence[LossShare], weights: Sequence[float]) -> tuple[float, float]:
        """Return how far the parts' gradients are from the whole's, and how large that is."""
        whole, *parts = shares
        error = 0.0
        for at, place in enumerate(self.wanted):
            if place is None:
                error += self._off_in_all(at, shares, weights)
            else:
                for number, weight in enumerate(weights):
                    best, left, square, full = self._fit(at, place, whole, parts[number], number)
                    error += left + (best - weight) ** 2 * square if weight else full
        return math.sqrt(error), whole.norm

    def _fit(
        self, at: int, place: tuple[int, int], whole: LossShare, part: LossShare, number: int
    ) -> tuple[float, float, float, float]:
        """Return the weight of a part that fits best, what that leaves, and the squares of the part and the whole."""
        key = part, at, number
        if key not in self._fits:
            (first, end), (dim, inside) = self.bounds[number], place
            full, tensor = whole.gradient[at], part.gradient[at]
            rows = None if full is None else full.narrow(dim, first * inside, (end - first) * inside)
            if rows is None or tensor is None:
                size = 0.0 if rows is None else norm_of(rows) ** 2
                self._fits[key] = 0.0, size, 0.0 if tensor is None else norm_of(tensor) ** 2, size
            else:
                size, product, square = products(rows, tensor)
                best = product / square if square else 0.0
                self._fits[key] = best, max(size - best * product, 0.0), square, size
        return self._fits[key]

    def _off_in_all(self, at: int, shares: Sequence[LossShare], weights: Sequence[float]) -> float:
        """Return how far the gradient of a tensor without rows is off, which all parts share."""
        full, *each = (share.gradient[at] for share in shares)
        added = [tensor * weight for tensor, weight in zip(each, weights, strict=True) if tensor is not None and weight]
        if full is None and not added:
            return 0.0
        total = sum(added[1:], start=added[0]) if added else torch.zeros_like(full)  # type: ignore[arg-type]
        return norm_of(total if full is None else full - total) ** 2


def compare(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    rows: int,
    device: torch.device,
    attempt: int = 0,
    *,
    shrinks: bool = True,
    turn: int = 0,
    order: Sequence[int] | None = None,
    most: int | None = None,
    linked: bool = False,
) -> LossComparison | None:
    """Compare a loss of rows, at `most` so many, with those of parts of them; None if it is no number.

    `attempt` chooses another dimension as that of rows, if several could be. Without `shrinks`, copies are equal.
    Every `turn` draws other random numbers. `order` is that of the rows, of which the first ones are one part.
    With `linked`, rows keep their graph, for a loss that takes gradients of its outputs.

    >>> from torch.nn.functional import mse_loss
    >>> outcome = compare(mse_loss, torch.randn(5, 2), torch.ones(5, 2), 5, torch.device("cpu"))
    >>> outcome.fits(outcome.shares(None), [0.2, 0.8]), outcome.fits(outcome.shares(None), [1, 1]), outcome.sizes
    (True, False, [1, 4])
    """
    trained = [tensor.requires_grad for tensor in pack(output)[0]]
    if linked:
        return _compared(loss_fn, first_rows(output, target, rows), trained, device, turn, linked=True)
    chosen = chosen_rows(output, target, rows, attempt, shrinks=shrinks, most=most)
    if order is not None:
        chosen = chosen.ordered(order)
    if _is_low(chosen, device):  # in full precision if it can be, where weights are told better
        try:
            with torch.autocast(device.type, enabled=False):
                return _compared(loss_fn, chosen.full(), trained, device, turn)
        except Exception:  # it needs the precision that it gets
            pass
    return _compared(loss_fn, chosen, trained, device, turn)


def _compared(
    loss_fn: Callable[..., Any],
    chosen: Rows,
    trained: Sequence[bool],
    device: torch.device,
    turn: int,
    *,
    linked: bool = False,
) -> LossComparison | None:
    tensors = pack(chosen.output)[0]
    wanted = [
        (tensor.is_floating_point() or tensor.is_complex()) and (has or not any(trained))
        for tensor, has in zip(tensors, trained, strict=True)
    ]
    if not any(wanted):
        return None
    # A third, so that neither part is a multiple of the other if there are enough rows.
    cut = max(chosen.rows // 3, 1)
    bounds = ((0, cut), (cut, chosen.rows))
    draws = LossDraws(device, turn)

    def run(draws: LossDraws, first: int, end: int, like: Side | None) -> Side | None:
        """Return a loss of some rows, leaving no trace."""
        output, target = chosen.part(first, end)
        drawing = draws.of(first, end, chosen.rows)
        with warnings.catch_warnings(), undisturbed(loss=loss_fn):
            warnings.simplefilter("ignore")  # the real call tells them
            if linked:
                return linked_side_of(loss_fn, chosen.output, target, wanted, chosen.outputs, (first, end), drawing)
            return side_of(loss_fn, output, target, wanted, drawing, like)

    whole = run(draws, 0, chosen.rows, None)
    if draws.is_missed:
        draws = LossDraws(device, turn, everywhere=True)
        whole = run(draws, 0, chosen.rows, None)
    if whole is None:
        return None
    sides = [whole]
    for first, end in bounds:
        side = run(draws, first, end, whole)
        if side is None:
            return None
        sides.append(side)
    places = tuple(place for place, wants in zip(chosen.outputs, wanted, strict=True) if wants)
    near = _near([tensor.dtype for tensor, wants in zip(tensors, wanted, strict=True) if wants], draws.device)
    near_value = max(near, _near([sides[0].call.loss.dtype], draws.device))
    return LossComparison(chosen, bounds, sides[0], tuple(sides[1:]), near, near_value, places, draws)


def _is_low(chosen: Rows, device: torch.device) -> bool:
    kinds = {tensor.dtype for tensor in pack(chosen.output)[0] if tensor.is_floating_point()}
    return torch.is_autocast_enabled(device.type) or any(kind not in _NEAR for kind in kinds)


def _near(kinds: Sequence[torch.dtype], device: torch.device) -> float:
    """Return how near sums in these precisions come to each other."""
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}
    near = max(_NEAR.get(real.get(kind, kind), _HALF) for kind in kinds)
    if torch.is_autocast_enabled(device.type):
        return _HALF
    return near if device.type == "cpu" else max(near, _LESS_NEAR)
