"""Values that travel between stages: any nesting of tensors and plain values, taken apart and put together again.

    (x, {"mask": m, "scale": 2.0})   ──►   tensors (x, m) and the form ("tuple", 0, ("dict", ("mask", "scale"), 1, ...))

A single tensor, the common case, has the form None. A tensor in two places stays one tensor.

This module also searches the values inside a model: tensors with the path to each, and objects that must not travel.
"""

from __future__ import annotations

import enum
import functools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from drumline.core.errors import ModelError
from drumline.model.microbatches import Microbatches

Path = tuple[tuple[str, Any], ...]  # the path to a tensor inside a result: ("item", 0), ("field", "x")

# How many parts of a form precede its values: names, a type, or both.
HEADERS = {"dict": 1, "named": 1, "fields": 2, "mapping": 2}
APART = "microbatches"  # the kind of a form with one part per microbatch
_LEAVES = frozenset({type(None), bool, int, float, str})  # plain values in which nothing can hide
_CONTAINERS: dict[str, Callable[[Sequence[Any]], Any]] = {"list": list, APART: Microbatches}


def pack(value: Any) -> tuple[tuple[Tensor, ...], Any]:
    """Return the tensors inside `value`, and the form from which `unpack` rebuilds it.

    >>> import torch
    >>> tensors, form = pack({"a": torch.ones(2), "b": [3, None]})
    >>> form
    ('dict', ('a', 'b'), 0, ('list', ('plain', 3), ('plain', None)))
    >>> unpack(tensors, form)
    {'a': tensor([1., 1.]), 'b': [3, None]}
    """
    if isinstance(value, Tensor):
        return (value,), None
    tensors: list[Tensor] = []
    form = _form(value, tensors, {})
    return tuple(tensors), form


def unpack(tensors: Sequence[Tensor], form: Any) -> Any:
    """Return the value that `pack` took apart."""
    return tensors[0] if form is None else _value(tensors, form)


def unpack_each(columns: Sequence[Sequence[Tensor]], form: Any, count: int) -> list[Any]:
    """Return so many values, each with its pieces of the tensors that `pack` took apart.

    >>> tensors, form = pack({"x": torch.arange(4), "scale": 2.0})
    >>> unpack_each([tensors[0].chunk(2)], form, 2)
    [{'x': tensor([0, 1]), 'scale': 2.0}, {'x': tensor([2, 3]), 'scale': 2.0}]
    """
    return list(columns[0] if form is None else _values(columns, form, count))


def _form(value: Any, tensors: list[Tensor], places: dict[int, int]) -> Any:
    """Return the form of a value, adding its tensors to `tensors`, and their places there by their ids."""
    kind = type(value)
    head: tuple[Any, ...]
    inside: Iterable[Any]
    if kind is tuple or kind is list:
        head, inside = (kind.__name__,), value
    elif kind is dict:
        head, inside = ("dict", tuple(value)), value.values()
    elif kind is Microbatches:
        head, inside = (APART,), value
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        head, inside = ("named", kind), value
    elif is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in fields(value))
        head, inside = ("fields", kind, names), [getattr(value, name) for name in names]
    elif kind is slice:
        head, inside = ("slice",), (value.start, value.stop, value.step)
    elif isinstance(value, dict):
        head, inside = ("mapping", kind, tuple(value)), value.values()
    else:
        _refuse_hidden(value)
        return ("plain", value)
    parts: list[Any] = []
    for tensor in inside:
        if isinstance(tensor, Tensor):
            place = places.setdefault(id(tensor), len(tensors))  # a tensor in two places stays one
            if place == len(tensors):
                tensors.append(tensor)
            parts.append(place)
        elif type(tensor) in _LEAVES:
            parts.append(("plain", tensor))
        else:
            parts.append(_form(tensor, tensors, places))
    return (*head, *parts)


def _refuse_hidden(value: Any) -> None:
    """Refuse an object with hidden tensors: their gradients would be lost."""
    sequence = isinstance(value, tuple | list | set | frozenset)
    inside = value if sequence else getattr(value, "__dict__", {}).values()
    if any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in inside):
        raise ModelError(
            f"a block returns a {type(value).__name__} with tensors inside",
            expected="tensors in tuples, lists, dicts, named tuples or dataclasses",
        )


def _value(tensors: Sequence[Tensor], form: Any) -> Any:
    if isinstance(form, int):
        return tensors[form]
    kind, *parts = form
    if kind == "plain":
        return parts[0]
    if kind == "kinds":
        inside, kinds = parts
        return unpack(
            [t if kind is None else t.as_subclass(kind) for t, kind in zip(tensors, kinds, strict=True)], inside
        )
    first = HEADERS.get(kind, 0)
    inner = [tensors[part] if isinstance(part, int) else _value(tensors, part) for part in parts[first:]]
    if kind in ("tuple", "list"):
        return tuple(inner) if kind == "tuple" else inner
    if kind == "dict":
        return dict(zip(parts[0], inner, strict=True))
    if kind == "named":
        return parts[0](*inner)
    return _values([[tensor] for tensor in inner], (kind, *parts[:first], *range(len(inner))), 1)[0]


def _values(columns: Sequence[Sequence[Tensor]], form: Any, count: int) -> Sequence[Any]:
    """Return as many values as each tensor has pieces, by calls that depend on the form alone."""
    if isinstance(form, int):
        return columns[form]
    kind, *parts = form
    if kind == "plain":
        return [parts[0]] * count
    first = HEADERS.get(kind, 0)
    inner = [columns[part] if isinstance(part, int) else _values(columns, part, count) for part in parts[first:]]
    rows = list(zip(*inner, strict=True)) if inner else [()] * count
    if kind == "tuple":
        return rows
    if kind == "dict":
        return [dict(zip(parts[0], row, strict=True)) for row in rows]
    if kind == "named":
        return [parts[0](*row) for row in rows]
    if kind == "fields":
        return [rebuilt(parts[0], dict(zip(parts[1], row, strict=True))) for row in rows]
    if kind == "mapping":
        return [parts[0](dict(zip(parts[1], row, strict=True))) for row in rows]
    if kind == "slice":
        return [slice(*row) for row in rows]
    return [_CONTAINERS[kind](row) for row in rows]


def rebuilt(kind: type, values: dict[str, Any]) -> Any:
    """Return a dataclass with these values, including those that its constructor does not take."""
    late = [field.name for field in fields(kind) if not field.init]
    new_kind = kind(**{name: value for name, value in values.items() if name not in late})
    for name in late:
        object.__setattr__(new_kind, name, values[name])  # works for frozen dataclasses too
    return new_kind


def plain_in(form: Any) -> list[Any]:
    """Return the plain values in a form.

    >>> plain_in(pack(("a", {"b": [1, None]}))[1])
    ['a', 1, None]
    """
    plain_values, todo = [], [form]
    while todo:
        entry = todo.pop()
        if isinstance(entry, tuple):
            if entry[0] == "plain":
                plain_values.append(entry[1])
            else:
                todo += reversed(entry[1 + HEADERS.get(entry[0], 0) :])
    return plain_values


def mapped(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return the value with a function applied to each of its tensors.

    >>> mapped({"a": torch.ones(2), "b": 3}, torch.neg)
    {'a': tensor([-1., -1.]), 'b': 3}
    """
    tensors, form = pack(value)
    return unpack([function(tensor) for tensor in tensors], form)


def moved(value: Any, device: torch.device) -> Any:
    """Return the value with its tensors on a device; the value itself if all of them are there."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    tensors, form = pack(value)
    there = [tensor.to(device, non_blocking=True) for tensor in tensors]
    return value if all(map(is_, tensors, there)) else unpack(there, form)


def joined(values: Sequence[Any], shares: Sequence[Tensor] = ()) -> Any:
    """Merge the values of several microbatches, joining tensors along the first dimension.

    Tensors without dimensions (losses) are averaged, by the microbatches' shares if given.

    >>> joined([(torch.zeros(1, 2), "a"), (torch.ones(2, 2), "a")])[0].shape
    torch.Size([3, 2])
    """
    packed = [pack(value) for value in values]
    columns = zip(*(each for each, _ in packed), strict=True)
    tensors = [torch.cat(column) if column[0].dim() else _mean(column, shares) for column in columns]
    return unpack(tensors, packed[0][1])


def _mean(column: Sequence[Tensor], shares: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(column))
    return (stacked * torch.stack(list(shares)).to(stacked.dtype)).sum() if len(shares) else stacked.float().mean()


_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, enum.Enum, type(...), type, range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo,
)  # fmt: skip


def tensors_in(value: Any) -> list[Tensor]:
    """Return every tensor inside."""
    return [tensor for _, tensor in found_in(value)]


def found_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """Yield every tensor inside, with the path to it."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from found_in(item, (*path, ("item", key)))
    elif isinstance(value, tuple | list):
        for at, item in enumerate(value):
            yield from found_in(item, (*path, ("item", at)))
    elif isinstance(value, slice):
        for name in ("start", "stop", "step"):
            yield from found_in(getattr(value, name), (*path, ("field", name)))
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from found_in(getattr(value, field.name, None), (*path, ("field", field.name)))


def with_kinds(tensors: Sequence[Tensor], form: Any) -> Any:
    """Return the form of a message from which `unpack` restores tensors of classes of their own, too.

    A class whose objects hold more than a tensor, or that another process could not import, is left out: there, such a
    tensor is a plain one.

    >>> with_kinds([torch.ones(2)], None) is None
    True
    """
    if all(type(tensor) is Tensor for tensor in tensors):
        return form
    kinds = tuple(_kind_to_send(tensor) for tensor in tensors)
    return ("kinds", form, kinds) if any(kind is not None for kind in kinds) else form


def _kind_to_send(tensor: Tensor) -> type[Tensor] | None:
    kind = type(tensor)
    if kind is Tensor or isinstance(tensor, nn.Parameter) or vars(tensor) or hasattr(kind, "__tensor_flatten__"):
        return None
    return kind if _can_travel(kind) else None


@functools.cache
def _can_travel(kind: type[Tensor]) -> bool:
    """Whether another process can import a class."""
    try:
        pickle.dumps(kind)
    except (pickle.PicklingError, AttributeError):
        return False
    return kind.__module__ != "__main__"


_WITHOUT_CACHE = (
    "pass use_cache=False; prefix tuning always passes a cache of keys and cannot be cut: use prompt tuning, LoRA or "
    "another adapter"
)


def refuse_objects(form: Any, what: str) -> None:
    """Refuse plain objects that can change: all microbatches would share them, and they would stay on this rank."""
    for value in plain_in(form):
        if not isinstance(value, _PLAIN) and not callable(value):
            kind = type(value).__name__
            raise ModelError(
                f"{what} gets or returns a {kind}",
                expected="tensors, plain values, or tuples, lists, dicts and dataclasses of these",
                fix=_WITHOUT_CACHE if "Cache" in kind else "pass its contents instead",
            )


def refuse_fake(value: Any) -> None:
    """Refuse a constant that is a stand-in, or a function or module that holds one: it would have no data."""
    inside = [value]
    if isinstance(value, functools.partial):
        inside += [value.func, *value.args, *value.keywords.values()]
    for item in list(inside):
        inside += [content_of(cell) for cell in getattr(item, "__closure__", None) or ()]
        inside += [*(getattr(item, "__defaults__", None) or ()), getattr(item, "__self__", None)]
    for module in inside:
        tensors = [*module.parameters(), *module.buffers()] if isinstance(module, nn.Module) else tensors_in(module)
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            raise ModelError(
                f"the model's forward passes a {type(value).__name__} that contains tensors of the model to a function "
                "between its blocks",
                expected="tensors and plain values as arguments between blocks",
                fix="move the call into a block",
            )


MISSING: Any = object()  # marks a missing value


def content_of(cell: Any) -> Any:
    """Return the value of a closure's variable, MISSING if it is not set."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING
