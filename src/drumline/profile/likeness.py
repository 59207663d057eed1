"""Whether blocks are alike: the same code with the same settings, on parameters of the same shapes.

    model.layers.1  ──►  classes, settings, shapes, code      layer_idx = 1
    model.layers.2  ──►  classes, settings, shapes, code      layer_idx = 2       alike, if nothing reads layer_idx

A whole number that follows the number in a block's name is its place in a list. Blocks that differ in nothing else are
alike unless their forward reads it: `Watched` sees that. Of fractions (a dropout's probability) only whether they are
0 or 1 counts. Whatever cannot be compared makes a block unlike all others.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.quantised.packed import parts_of, unpacked_shape
from drumline.model.values import content_of

_PLAIN = (type(None), bool, bytes, complex, enum.Enum, range, torch.dtype, torch.device, torch.Size, torch.layout)
_NAMED = (type, BuiltinFunctionType, ModuleType)
_VALUE = re.compile(r"\bv(\d+)\b")
_OWN = re.compile(r"\b[tn]\d+\b")
_CONSTANT = re.compile(r"\b(c\d+)\b")
_MOST = 20_000  # values of a block that are looked at
_INDEX, _NAME = "its place", "its name"


@dataclass(frozen=True, slots=True)
class Number:
    """A whole number in a block, and the module whose attribute it is, if it is one."""

    value: int
    owner: nn.Module | None
    name: str


@dataclass(frozen=True, slots=True)
class Likeness:
    """What blocks that are alike have in common; `places` are attributes that differ, each by the block's number."""

    key: Hashable
    places: tuple[Number, ...] = ()


def likenesses(blocks: Sequence[Block], codes: Sequence[Any] = ()) -> list[Likeness]:
    """Return the likeness of each block; `codes` are what traced blocks run.

    >>> layers = [nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 3)]
    >>> first, second, third = likenesses([Block(str(at), layer) for at, layer in enumerate(layers)])
    >>> first == second, second == third
    (True, False)
    """
    looks = [_Likeness(block.name) for block in blocks]
    outlines = [
        look.piece(block.module, codes[at] if codes else None) if isinstance(block.module, Piece)
        else look.module(block.module)
        for at, (look, block) in enumerate(zip(looks, blocks, strict=True))
    ]  # fmt: skip
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for at, outline in enumerate(outlines):
        groups[outline].append(at)
    alike: list[Likeness] = [Likeness(None)] * len(blocks)
    for outline, members in groups.items():
        names = [[int(digits) for digits in re.findall(r"\d+", blocks[at].name)] for at in members]
        columns = list(zip(*(looks[at].numbers for at in members), strict=True))
        follows = [_follows(column, names) for column in columns]
        for row, at in enumerate(members):
            numbers = [column[row] for column in columns]
            values = (_INDEX if place else number.value for number, place in zip(numbers, follows, strict=True))
            places = (number for number, place in zip(numbers, follows, strict=True) if place)
            alike[at] = Likeness((outline, tuple(values)), tuple(places))
    return alike


def _follows(column: Sequence[Number], names: Sequence[Sequence[int]]) -> bool:
    """Whether numbers differ between blocks as the numbers in their names do."""
    if len({number.value for number in column}) < 2 or any(number.owner is None for number in column):
        return False
    return any(
        len({number.value - digit for number, digit in zip(column, digits, strict=True)}) == 1
        for digits in zip(*names, strict=False)
    )


@dataclass(slots=True)
class _Likeness:
    """A walk through one block."""

    block: str
    numbers: list[Number] = field(default_factory=list)
    seen_ids: dict[int, int] = field(default_factory=dict)  # modules, tensors and objects, by id

    def piece(self, piece: Piece, code: Any) -> Hashable:
        """Return the outline of a traced block: what it calls, and its code, in the order of its values."""
        modules = tuple(self.value(callee) for callee in piece.callees.values())
        states = tuple(self.value(_state(piece, name)) for name in piece.homes)
        names = [*piece.callees, *piece.homes]
        return modules, states, *(self._code(run, takes, names) for run, takes in _functions(code))

    def _code(self, run: Any, takes: Sequence[int], names: Sequence[str]) -> Hashable:
        """Return a function's source with names that do not depend on the block, and its constants."""
        source = run.source.partition("\n")[2]
        for at, name in enumerate(names):
            source = source.replace(repr(name), f"<{at}>")
        order = {str(value): f"t{at}" for at, value in enumerate(sorted(takes))}
        source = _VALUE.sub(lambda match: order.setdefault(match[1], f"n{len(order)}"), source)
        body, _, returned = source.rpartition("\n")
        constants = tuple(self.value(run.__globals__.get(name)) for name in _CONSTANT.findall(source))
        return len(takes), body, tuple(sorted(_OWN.findall(returned))), constants

    def module(self, module: nn.Module) -> Hashable:
        """Return a module's outline: its class, settings, tensors and what is inside."""
        if (before := self._again(module)) is not None:
            return before
        entries: list[Any] = [type(module)]
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                entries += [(name, key, self.value(each)) for key, each in value.items()]
            elif name.endswith("_hooks") and isinstance(value, Mapping):
                entries += [(name, self.value(each)) for each in value.values()]  # by handles, which all differ
            else:
                entries.append((name, self.value(value, module, name)))
        return tuple(entries)

    def _again(self, value: Any) -> Hashable | None:
        """Return the number of what was seen before, or None the first time."""
        if id(value) in self.seen_ids:
            return "again", self.seen_ids[id(value)]
        self.seen_ids[id(value)] = len(self.seen_ids)
        return None

    def value(self, value: Any, owner: nn.Module | None = None, name: str = "") -> Hashable:
        """Return what two values have in common if they are alike."""
        if isinstance(value, str):
            return str, value.replace(self.block, _NAME)
        if isinstance(value, _PLAIN):
            return type(value), value
        if isinstance(value, int):
            self.numbers.append(Number(int(value), owner, name))
            return (type(value),)
        if isinstance(value, float):
            return float, value if value in (0.0, 1.0) else "between"
        if isinstance(value, _NAMED):
            return "is", id(value)
        if len(self.seen_ids) > _MOST:
            return "too many", id(self)
        if isinstance(value, nn.Module):
            return self.module(value)
        if (before := self._again(value)) is not None:
            return before
        return self._inside(value)

    def _inside(self, value: Any) -> Hashable:
        if isinstance(value, Tensor):
            hooks = value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)
            parts = tuple((name, part.shape, part.dtype, part.stride()) for name, part in parts_of(value).items())
            return type(value), parts, unpacked_shape(value), value.requires_grad, id(value) if hooks else 0
        if isinstance(value, Mapping):
            return type(value), tuple((self.value(key), self.value(each)) for key, each in value.items())
        if isinstance(value, list | tuple):
            return type(value), tuple(map(self.value, value))
        if isinstance(value, set | frozenset):
            return type(value), frozenset(map(repr, value))
        if isinstance(value, FunctionType):
            inside = (value.__defaults__, [content_of(cell) for cell in value.__closure__ or ()])
            return "code", id(value.__code__), self.value(inside)
        if isinstance(value, MethodType):
            return "method", self.value(value.__func__), self.value(value.__self__)
        if isinstance(value, partial):
            return "partial", self.value([value.func, value.args, value.keywords])
        fields = getattr(value, "__dict__", None)
        if fields is None:
            return "is", id(value)
        return type(value), tuple((name, self.value(each)) for name, each in fields.items())


def _functions(code: Any) -> Iterator[tuple[Any, Sequence[int]]]:
    yield code.run, code.takes
    yield code.resume, code.resumes


def _state(piece: Piece, name: str) -> Any:
    home, last = piece.homes[name], name.rpartition(".")[2]
    return home._parameters.get(last, home._buffers.get(last))


class Watched:
    """Tells whether a forward reads attributes: inside, the modules' classes have properties in their place.

    >>> class Layer(nn.Module):
    ...     def __init__(self, place):
    ...         super().__init__()
    ...         self.place = place
    ...     def forward(self, x): return x * self.place
    >>> layer = Layer(3)
    >>> with Watched([Number(3, layer, "place")]).watching() as watched:
    ...     _ = layer(torch.ones(1))
    >>> watched.is_read, type(layer) is Layer, layer.place
    (True, True, 3)
    """

    def __init__(self, places: Sequence[Number]) -> None:
        self.is_read = False
        self._names: dict[nn.Module, list[str]] = defaultdict(list)
        for place in places:
            assert place.owner is not None
            self._names[place.owner].append(place.name)

    @contextmanager
    def watching(self) -> Iterator[Watched]:
        """Watch inside."""
        kinds = {module: type(module) for module in self._names}
        try:
            for module, kind in kinds.items():
                properties = {name: self._property(name) for name in self._names[module]}
                metaclass: Any = type(kind)
                module.__class__ = metaclass(kind.__name__, (kind,), {"__module__": kind.__module__, **properties})
            yield self
        finally:
            for module, kind in kinds.items():
                module.__class__ = kind

    def _property(self, name: str) -> property:
        def get(module: nn.Module) -> Any:
            self.is_read = True
            return vars(module)[name]

        def put(module: nn.Module, value: Any) -> None:
            self.is_read = True
            vars(module)[name] = value

        return property(get, put)
