"""A loss of some rows, taken apart: what each of its parts adds to it, and to the gradient of the outputs.

    loss  =  rest  +  a1 * mse_loss(...)  +  a2 * (...).sum()          a1 and a2 are gradients of the loss

The rest is what no call was seen to add up over rows: a penalty on weights, or a part of unknown kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from drumline.engine.loss.rules.linked_rows import LinkedRows
from drumline.engine.loss.rules.rows import Places
from drumline.engine.loss.rules.watching import KnownValues, LossCall, picks_by_outputs, reads_targets, watched
from drumline.model.loss.calls import name_of
from drumline.model.loss.counts import mixed_by
from drumline.model.loss.terms import Term, Walk
from drumline.model.values import mapped, pack, unpack
from drumline.runtime.backward.tape import gradients_at

_MOST_TERMS = 8
_AT_ONCE = 2**20  # numbers that are made double at a time
_NEGLIGIBLE = 1e-5

Gradient = tuple[Tensor | None, ...]  # of the outputs' tensors
Drawing = AbstractContextManager[AbstractContextManager[object] | None]  # yields a mode for calls that draw


@dataclass(frozen=True, eq=False)
class LossShare:
    """What one part of a loss adds to it, and the gradient of that with respect to the outputs."""

    value: float
    gradient: Gradient

    @property
    def is_finite(self) -> bool:
        """Whether it is a number; the mean over nothing is not."""
        return math.isfinite(self.value) and math.isfinite(self.norm)

    @property
    def is_zero(self) -> bool:
        """Whether it is a sum of nothing: zero, without a gradient."""
        return not self.value and not self.norm

    @cached_property
    def norm(self) -> float:
        """The norm of the gradient."""
        return math.sqrt(sum(norm_of(tensor) ** 2 for tensor in self.gradient if tensor is not None))


def norm_of(tensor: Tensor) -> float:
    """Return the norm of a tensor; of float32 it may be off by 1e-4."""
    norm = float(torch.linalg.vector_norm(tensor.detach()))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(tensor.detach().double()))


def products(tensor: Tensor, other: Tensor) -> tuple[float, float, float]:
    """Return the square of one, the product of both and the square of the other, in double precision.

    >>> products(torch.tensor([1e30, 2.0]), torch.tensor([0.0, 3.0]))[1:]
    (6.0, 9.0)
    """
    flat = [_real(each).reshape(-1) for each in (tensor, other)]
    total = [0.0, 0.0, 0.0]
    for at in range(0, flat[0].numel(), _AT_ONCE):  # with little memory
        a, b = (each[at : at + _AT_ONCE].double() for each in flat)
        sums = torch.stack([a @ a, a @ b, b @ b]).tolist()
        total = [before + each for before, each in zip(total, sums, strict=True)]
    return total[0], total[1], total[2]


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


@dataclass(frozen=True, eq=False)
class Side:
    """A loss of some rows: all of it, its parts, and the rest."""

    whole: LossShare
    terms: tuple[LossShare, ...]
    rest: LossShare
    walk: Walk
    call: LossCall
    size: float  # about how large the numbers are that it adds up
    is_told: bool  # whether the gradient of all of it is that of its parts

    @cached_property
    def names(self) -> list[str]:
        """The calls that compute its parts, in order."""
        return [name_of(self.walk.graph.calls[term.call]) for term in own_terms(self.walk)]

    @cached_property
    def known(self) -> KnownValues:
        """What comes from the targets alone."""
        return KnownValues.of(self.call.graph, self.call.targets)

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """How it reads its targets on the host."""
        return tuple(reads_targets(self.call, self.known))

    @cached_property
    def picks(self) -> tuple[str, ...]:
        """The calls by which it picks what counts by its outputs."""
        return tuple(picks_by_outputs(self.call, self.known))

    @cached_property
    def is_clear(self) -> bool:
        """Whether its calls show all that it does, row by row, so that few rows tell as much as many."""
        return self.is_told and not (self.reads or self.picks or mixed_by(self.walk))


def own_terms(walk: Walk) -> list[Term]:
    """Return the parts of a loss, each once; none if they are too many to be told apart."""
    terms = {term.call: term for term in walk.terms}
    return list(terms.values()) if len(terms) <= _MOST_TERMS else []


def side_of(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    wanted: Sequence[bool],
    drawing: Drawing | None = None,
    like: Side | None = None,
) -> Side | None:
    """Run a loss on rows, of which it gets copies, and take it apart; None if it is no number.

    `wanted` says of each of the output's tensors whether it has a gradient. The loss runs inside of `drawing`. `like`
    is the same loss of other rows: what is known from there is not looked for again.
    """
    tensors, form = pack(output)
    leaves = [tensor.detach().requires_grad_() for tensor, wants in zip(tensors, wanted, strict=True) if wants]
    with torch.enable_grad():
        each = iter(leaves)  # a loss may change its copies in place
        copies = [(next(each) if wants else tensor).clone() for tensor, wants in zip(tensors, wanted, strict=True)]
        return _run(loss_fn, unpack(copies, form), target, leaves, drawing, like, tuple)


def linked_side_of(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    wanted: Sequence[bool],
    places: Places,
    rows: tuple[int, int],
    drawing: Drawing | None = None,
) -> Side | None:
    """Run a loss on rows of an output that keep their graph, for a loss that takes gradients of its outputs."""
    live = [tensor for tensor, wants in zip(pack(output)[0], wanted, strict=True) if wants]
    where = [place for place, wants in zip(places, wanted, strict=True) if wants]

    def cut(gradient: Gradient) -> Gradient:
        pairs = zip(gradient, where, strict=True)
        return tuple(None if tensor is None else linked.rows_of(tensor, place) for tensor, place in pairs)

    with torch.enable_grad():
        linked = LinkedRows(output, places, *rows)
        with linked:
            return _run(loss_fn, linked.output, target, live, drawing, None, cut, keep=True)


def _run(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    leaves: Sequence[Tensor],
    drawing: Drawing | None,
    like: Side | None,
    cut: Callable[[Gradient], Gradient],
    *,
    keep: bool = False,
) -> Side | None:
    with drawing or nullcontext() as mode:
        graph = None if like is None else like.call.graph
        call = watched(loss_fn, output, mapped(target, Tensor.clone), graph, mode)
    if not isinstance(call.loss, Tensor) or call.loss.dim() or not call.loss.is_floating_point():
        return None
    if like is not None and call.is_again:
        return _taken_apart(call, like.walk, leaves, cut, keep=keep, is_told=like.is_told)
    return _taken_apart(call, Walk(call.graph, call.graph.outputs[0], call.targets), leaves, cut, keep=keep)


def _taken_apart(
    call: LossCall,
    walk: Walk,
    leaves: Sequence[Tensor],
    cut: Callable[[Gradient], Gradient],
    *,
    keep: bool,
    is_told: bool = False,
) -> Side:
    loss = call.loss
    value = float(loss.detach())
    nothing: Gradient = (None,) * len(leaves)
    own_parts = own_terms(walk)
    if not loss.requires_grad:
        share = LossShare(value, nothing)
        return Side(share, (LossShare(0.0, nothing),) * len(own_parts), share, walk, call, abs(value), is_told=False)
    end, row = [get_gradient_edge(loss)], [torch.ones_like(loss)]
    makes = [call.graph.calls[term.call].makes for term in own_parts]
    places = [call.scalars.get(each[0][1]) if each else None for each in makes]
    edges = [place[0] for place in places if place is not None]
    factors = iter(gradients_at(edges, end, row, keep=True) if edges else ())
    terms = []
    for place in places:
        factor = None if place is None else next(factors)
        if place is None or factor is None:  # no gradient goes through it
            terms.append(LossShare(0.0, nothing))
            continue
        gradient = cut(gradients_at(leaves, [place[0]], [factor.to(place[1].dtype)], keep=True))
        terms.append(LossShare(float(factor * place[1]), gradient))
    is_one = len(edges) == len(places) == 1 and not walk.others and terms[0].gradient != nothing
    if is_one or is_told:
        total = LossShare(value, _less(nothing, [each.gradient for each in terms], -1))
        left = nothing
    else:
        total = LossShare(value, cut(gradients_at(leaves, end, row, keep=keep)))
        left = _less(total.gradient, [each.gradient for each in terms])
    pairs = zip(total.gradient, leaves, strict=True)
    size = sum(norm_of(tensor) * norm_of(leaf) for tensor, leaf in pairs if tensor is not None)
    rest = LossShare(value - sum(each.value for each in terms), left)
    is_told = len(edges) == len(places) and not walk.others and rest.norm <= _NEGLIGIBLE * total.norm
    return Side(total, tuple(terms), rest, walk, call, (size if math.isfinite(size) else 0.0) + abs(value), is_told)


def _less(whole: Gradient, parts: Sequence[Gradient], sign: int = 1) -> Gradient:
    """Return what is left of a gradient without those of parts; with the sign -1, these are added."""
    tensors = []
    for at, tensor in enumerate(whole):
        for other in (part[at] for part in parts):
            if other is not None:
                tensor = (other if sign < 0 else -other) if tensor is None else tensor - other * sign
        tensors.append(tensor)
    return tuple(tensors)
