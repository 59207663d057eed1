"""Calls of a graph as a loss sees them: their names, their arguments, and the labels that torch's losses get."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.nn import functional

from drumline.model.graph.graph import Call
from drumline.model.values import unpack

BY_LABEL = (functional.cross_entropy, functional.nll_loss)


@dataclass(frozen=True, slots=True)
class Ref:
    """Represents one of a graph's values among a call's arguments."""

    value: int


@dataclass(frozen=True, slots=True)
class Labels:
    """What a loss over labels counts: those that are not ignored, weighted by class if there are class weights."""

    target: int
    ignored: int
    weight: int | None = None


@dataclass(frozen=True, slots=True)
class Elements:
    """What a mean over picked rows counts: the elements of a value that is picked alike."""

    value: int


Tally = Labels | Elements | int  # labels that count, elements, or the number of a value: a mask or a single number


def name_of(call: Call) -> str:
    """Return the name of the called function."""
    name: str = call.block or getattr(call.function, "__name__", str(call.function))
    return name


def arguments_of(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call, with `Ref`s for tensors."""
    refs: Any = [Ref(value) for value in call.takes]
    args, kwargs = unpack(refs, call.form)
    return args, kwargs


def labels_in(call: Call, is_known: Callable[[int], bool], is_fixed: Callable[[int], bool]) -> Labels | None:
    """Return the labels that a call of one of torch's losses counts, if they are known and their weights fixed."""
    arguments = bound(call)
    if arguments is None:
        return None
    target, weight = arguments["target"], arguments.get("weight")
    if not isinstance(target, Ref) or not is_known(target.value):
        return None
    if weight is not None and not is_fixed(weight.value):
        return None
    return Labels(target.value, int(arguments["ignore_index"]), None if weight is None else weight.value)


def bound(call: Call) -> dict[str, Any] | None:
    """Return the arguments of a call by name; None if the function's are not known."""
    assert call.function is not None
    args, kwargs = arguments_of(call)
    try:
        bound = inspect.signature(call.function).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    return dict(bound.arguments)


def loss_place(form: Any) -> int | None:
    """Return which of an output's tensors is its loss: the one named `loss`, the only one, or the first of a tuple.

    >>> loss_place(("dict", ("logits", "loss"), 0, 1)), loss_place(None), loss_place(("tuple", 0, 1))
    (1, 0, 0)
    """
    if form is None:
        return 0
    if isinstance(form, tuple):
        kind, *parts = form
        if kind in ("fields", "mapping", "dict"):
            names, values = (parts[0], parts[1:]) if kind == "dict" else (parts[1], parts[2:])
            place = dict(zip(names, values, strict=True)).get("loss")
            return place if isinstance(place, int) else None
        if kind in ("tuple", "list", "named"):
            first = parts[1] if kind == "named" else parts[0] if parts else None
            return first if isinstance(first, int) else None
    return None
