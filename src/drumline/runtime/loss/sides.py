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

from drumline.runtime.backward.tape import gradients_at
from drumline.runtime.loss.calls import name_of
from drumline.runtime.loss.terms import Term, Walk
from drumline.runtime.loss.watching import Watched, watched
from drumline.runtime.values import pack, unpack

_MOST_TERMS = 8

Gradient = tuple[Tensor | None, ...]  # of the outputs' tensors


@dataclass(frozen=True)
class Share:
    """What one part of a loss adds to it, and the gradient of that with respect to the outputs."""

    value: float
    gradient: Gradient

    @property
    def is_finite(self) -> bool:
        """Whether it is a number; the mean over nothing is not."""
        return math.isfinite(self.value) and math.isfinite(self.norm)

    @cached_property
    def norm(self) -> float:
        """The norm of the gradient."""
        return math.sqrt(sum(norm_of(one) ** 2 for one in self.gradient if one is not None))


def norm_of(tensor: Tensor) -> float:
    """Return the norm of a tensor."""
    found = float(torch.linalg.vector_norm(tensor.detach()))
    return found if math.isfinite(found) else float(torch.linalg.vector_norm(tensor.detach().double()))


@dataclass(frozen=True, slots=True)
class Side:
    """A loss of some rows: all of it, its parts, and the rest."""

    whole: Share
    terms: tuple[Share, ...]
    rest: Share
    walk: Walk
    seen: Watched
    size: float  # about how large the numbers are that it adds up

    @property
    def names(self) -> list[str]:
        """The calls that compute its parts, in order."""
        return [name_of(self.walk.graph.calls[one.call]) for one in own_terms(self.walk)]


def own_terms(walk: Walk) -> list[Term]:
    """Return the parts of a loss, each once; none if they are too many to be told apart."""
    found = {term.call: term for term in walk.terms}
    return list(found.values()) if len(found) <= _MOST_TERMS else []


def side_of(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    wanted: Sequence[bool],
    drawing: AbstractContextManager[object] | None = None,
) -> Side | None:
    """Run a loss on rows that nobody else holds, and take it apart; None if it is no number.

    `wanted` says of each of the output's tensors whether it has a gradient. The loss runs inside of `drawing`.
    """
    tensors, form = pack(output)
    leaves = [one.requires_grad_() for one, wants in zip(tensors, wanted, strict=True) if wants]
    with torch.enable_grad():
        each = iter([one.clone() for one in leaves])  # a loss may change them in place
        given = unpack([next(each) if wants else one for one, wants in zip(tensors, wanted, strict=True)], form)
        with drawing or nullcontext():
            seen = watched(loss_fn, given, target)
        if not isinstance(seen.loss, Tensor) or seen.loss.dim() or not seen.loss.is_floating_point():
            return None
        walk = Walk(seen.graph, seen.graph.outputs[0], seen.targets)
        return _taken_apart(seen, walk, leaves)


def _taken_apart(seen: Watched, walk: Walk, leaves: Sequence[Tensor]) -> Side:
    loss = seen.loss
    value = float(loss.detach())
    nothing: Gradient = (None,) * len(leaves)
    if not loss.requires_grad:
        share = Share(value, nothing)
        return Side(share, (Share(0.0, nothing),) * len(own_terms(walk)), share, walk, seen, abs(value))
    end, one = [get_gradient_edge(loss)], [torch.ones_like(loss)]
    made = [seen.graph.calls[term.call].makes for term in own_terms(walk)]
    places = [seen.scalars.get(each[0][1]) if each else None for each in made]
    edges = [place[0] for place in places if place is not None]
    factors = iter(gradients_at(edges, end, one, keep=True) if edges else ())
    terms = []
    for place in places:
        factor = None if place is None else next(factors)
        if place is None or factor is None:  # no gradient goes through it
            terms.append(Share(0.0, nothing))
            continue
        gradient = gradients_at(leaves, [place[0]], [factor.to(place[1].dtype)], keep=True)
        terms.append(Share(float(factor * place[1]), gradient))
    is_all = len(edges) == len(places) == 1 and not walk.others and terms[0].gradient != nothing
    total = Share(value, terms[0].gradient if is_all else gradients_at(leaves, end, one))
    pairs = zip(total.gradient, leaves, strict=True)
    size = sum(norm_of(one) * norm_of(leaf) for one, leaf in pairs if one is not None)
    rest = Share(
        value - sum(each.value for each in terms),
        nothing if is_all else _less(total.gradient, [each.gradient for each in terms]),
    )
    return Side(total, tuple(terms), rest, walk, seen, (size if math.isfinite(size) else 0.0) + abs(value))


def _less(whole: Gradient, parts: Sequence[Gradient]) -> Gradient:
    found = []
    for at, one in enumerate(whole):
        for part in parts:
            other = part[at]
            if other is not None:
                one = -other if one is None else one - other
        found.append(one)
    return tuple(found)
