"""What a forward reads between blocks and somebody changes between steps, wherever it is kept."""

from __future__ import annotations

import os
import sys
from array import array
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zoo.entry import WIDTH, ZOO, Entry, Stack


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclass(slots=True)
class SlottedFields:
    scale: float = 1.0


class Called:
    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self) -> float:
        return self.scale


class OfClass:
    scale = 1.0


class OwnDict(dict[str, float]):
    pass


class OwnList(list[float]):
    pass


class Tools:
    scaled: Any = staticmethod(lambda x: x)


def scaled(x: Tensor, scale: float) -> Tensor:
    return x * scale


def by_attribute(x: Tensor) -> Tensor:
    return x * by_attribute.scale  # type: ignore[attr-defined, no-any-return]


NAME = "zoo_settings"
elsewhere: Any = sys.modules.setdefault(NAME, ModuleType(NAME))
elsewhere.SCALE = by_attribute.scale = 1.0  # type: ignore[attr-defined]
FIELDS = SlottedFields()


def kept(
    name: str, make: Callable[[], Any], read: Callable[[Any, Tensor], Tensor], set_: Callable[[Any, Any], Any]
) -> None:
    """Register a model with something of its own that is read between blocks and set before each step."""

    class Keeps(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.own = make()

        def between(self, x: Tensor, at: int) -> Any:
            return read(self.own, x)

    ZOO[f"changed between steps: {name}"] = Entry(Keeps, change=lambda model, step: set_(model.own, 1.0 + step))


def _deep() -> Any:
    names = SimpleNamespace
    return names(a=names(b=names(c=names(d=names(scale=1.0)))))


kept("a field in slots", Slotted, lambda own, x: x * own.scale, lambda own, to: setattr(own, "scale", to))
kept("a field of what is called", Called, lambda own, x: x * own(), lambda own, to: setattr(own, "scale", to))
kept("a field of a class", OfClass, lambda own, x: x * own.scale, lambda own, to: setattr(OfClass, "scale", to))
kept(
    "a field deep inside",
    _deep,
    lambda own, x: x * own.a.b.c.d.scale,
    lambda own, to: setattr(own.a.b.c.d, "scale", to),
)
kept(
    "an object in a list in a dict",
    lambda: {"a": [SlottedFields()]},
    lambda own, x: x * own["a"][0].scale,
    lambda own, to: setattr(own["a"][0], "scale", to),
)
kept("a number of numpy's", lambda: np.ones(1), lambda own, x: x * float(own[0]), lambda own, to: own.fill(to))
kept(
    "numbers of numpy's as a tensor",
    lambda: np.ones(WIDTH, dtype=np.float32),
    lambda own, x: x * torch.from_numpy(own),
    lambda own, to: own.__setitem__(2, to),
)
kept("an array", lambda: array("d", [1.0]), lambda own, x: x * own[0], lambda own, to: own.__setitem__(0, to))
kept("a dict of one's own", lambda: OwnDict(a=1.0), lambda own, x: x * own["a"], lambda own, to: own.update(a=to))
kept("a list of one's own", lambda: OwnList([1.0]), lambda own, x: x * own[0], lambda own, to: own.__setitem__(0, to))
kept(
    "what only looks like a dict",
    lambda: UserDict(a=1.0),
    lambda own, x: x * own["a"],
    lambda own, to: own.update(a=to),
)
kept("a long list", lambda: [1.0] * 2000, lambda own, x: x * own[5], lambda own, to: own.__setitem__(5, to))
kept(
    "the arguments of a partial function",
    lambda: partial(scaled, scale=1.0),
    lambda own, x: own(x),
    lambda own, to: own.keywords.update(scale=to),
)


class Around(Stack):
    """Reads what is outside of it, in every way."""

    def between(self, x: Tensor, at: int, scale: float = 1.0) -> Any:
        import zoo_settings  # type: ignore[import-not-found]

        outside = float(os.environ.get("DRUMLINE_ZOO", "1")) * zoo_settings.SCALE * elsewhere.SCALE * FIELDS.scale
        return by_attribute(Tools.scaled(x)) * outside * scale


def around(name: str, change: Callable[[Any, int], Any]) -> None:
    ZOO[f"changed between steps: {name}"] = Entry(Around, change=change)


def _of_step(step: int) -> Any:
    return staticmethod(lambda x: x * (1.0 + step))


around("the environment", lambda model, step: os.environ.update(DRUMLINE_ZOO=str(1.0 + step % 2)))
around("a variable of a module imported inside", lambda model, step: setattr(elsewhere, "SCALE", 1.0 + step % 2))
around("an attribute of a function", lambda model, step: setattr(by_attribute, "scale", 1.0 + step % 2))
around("a field in slots, outside", lambda model, step: setattr(FIELDS, "scale", 1.0 + step % 2))
around("a function of a class", lambda model, step: setattr(Tools, "scaled", _of_step(step % 2)))
around("a default", lambda model, step: setattr(Around.between, "__defaults__", (1.0 + step % 2,)))


class Patched(Stack):
    pass


class Tripled(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return x * 3


def _on_class(model: Any, step: int) -> None:
    Patched.between = (lambda self, x, at: x * 2) if step == 1 else Stack.between  # type: ignore[method-assign]


def _on_instance(model: Any, step: int) -> None:
    model.between = (lambda x, at: x * 2) if step else (lambda x, at: x)


def _whole(model: Any, step: int) -> None:
    if step:
        model.forward = MethodType(lambda self, x: Stack.forward(self, x) * (1.0 + step), model)


ZOO["changed between steps: a method, on the class"] = Entry(Patched, change=_on_class)
ZOO["changed between steps: a method, on the model"] = Entry(Stack, change=_on_instance)
ZOO["changed between steps: the forward"] = Entry(Stack, change=_whole)
ZOO["changed between steps: the class"] = Entry(
    Stack, change=lambda model, step: setattr(model, "__class__", Tripled if step == 1 else Stack)
)
