"""A batch that the user cut, in the form that `pack` has of it: what each microbatch gets, and how large that is.

::

    form                                         of microbatch 1
    ("dict", ("x", "n"),                         ("dict", ("x", "n"),
             ("microbatches", 0, 1, 2),                   1,
             ("plain", 3))                                ("plain", 3))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from drumline.core.errors import BatchError, counted
from drumline.model.values import APART, HEADERS, pack


def has_microbatches(value: Any) -> bool:
    """Whether any part of a value is given microbatch by microbatch.

    >>> from drumline.model.microbatches import Microbatches
    >>> has_microbatches({"x": Microbatches([1, 2])}), has_microbatches({"x": (1, 2)})
    (True, False)
    """
    return is_apart(pack(value)[1])


def is_apart(form: Any) -> bool:
    """Whether a form has a part for each microbatch somewhere."""
    return isinstance(form, tuple) and bool(_apart_in(form))


def _apart_in(form: Any) -> list[tuple[Any, ...]]:
    """Return what is given microbatch by microbatch: a form for each."""
    parts, todo = [], [form]
    while todo:
        entry = todo.pop()
        if isinstance(entry, tuple) and entry[0] == APART:
            parts.append(entry[1:])
        elif isinstance(entry, tuple) and entry[0] != "plain":
            todo += reversed(entry[1 + HEADERS.get(entry[0], 0) :])
    return parts


def _places(form: Any) -> Iterator[int]:
    """Yield the numbers of the tensors in a form."""
    if isinstance(form, int):
        yield form
    elif isinstance(form, tuple) and form[0] != "plain":
        for part in form[1 + HEADERS.get(form[0], 0) :]:
            yield from _places(part)


def inside(form: Any) -> set[int]:
    """Return the numbers of the tensors that are given microbatch by microbatch.

    >>> inside(("tuple", ("microbatches", 0, 2), 1))
    {0, 2}
    """
    return {place for each in _apart_in(form) for part in each for place in _places(part)}


def forms(tensors: Sequence[Tensor], form: Any, num_microbatches: int, what: str) -> list[Any]:
    """Return every microbatch's form; refuses what has other counts, other kinds of values, or nothing in it.

    >>> import torch
    >>> forms([torch.ones(1)] * 2, ("dict", ("x", "n"), ("microbatches", 0, 1), ("plain", 3)), 2, "the batch")[1]
    ('dict', ('x', 'n'), 1, ('plain', 3))
    """
    for each in _apart_in(form):
        if len(each) != num_microbatches:
            raise BatchError(
                f"{what} has {counted(len(each), 'value')} in Microbatches",
                expected=f"one for each of the program's {counted(num_microbatches, 'microbatch')}",
                fix="pass as many, or program=, one for that number of microbatches",
            )
        _check_alike(tensors, each, what)
    for microbatch, lead in enumerate(lead_of(tensors, form)):
        if lead is not None and lead.numel() == 0:
            raise BatchError(
                f"{what} has an empty tensor of the shape {tuple(lead.shape)} in microbatch {microbatch}",
                expected="at least one row and one place in every microbatch",
                fix="leave it out, and run a program of fewer microbatches",
            )
    return [_of(form, microbatch) for microbatch in range(num_microbatches)]


def _of(form: Any, microbatch: int) -> Any:
    if not isinstance(form, tuple) or form[0] == "plain":
        return form
    if form[0] == APART:
        return form[1 + microbatch]
    head = 1 + HEADERS.get(form[0], 0)
    return (*form[:head], *(_of(part, microbatch) for part in form[head:]))


def _check_alike(tensors: Sequence[Tensor], each: Sequence[Any], what: str) -> None:
    tensor = tensors[each[0]] if isinstance(each[0], int) else None
    first = ""
    for microbatch, form in enumerate(each):
        if tensor is not None and isinstance(form, int):
            other = tensors[form]
            if other.dtype == tensor.dtype and other.dim() == tensor.dim():
                continue  # as in most steps, without words
        first = first or _kind(tensors, each[0])
        if is_apart(form):
            raise BatchError(f"{what} has Microbatches inside of Microbatches", expected="one value for a microbatch")
        if (kind := _kind(tensors, form)) != first:
            raise BatchError(
                f"{what} has {first} in microbatch 0 and {kind} in microbatch {microbatch}",
                expected="values of one kind in all microbatches; only shapes may differ",
            )


def _kind(tensors: Sequence[Tensor], form: Any) -> str:
    """Return what a value consists of, but for shapes, as text."""
    if isinstance(form, int):
        return f"a {str(tensors[form].dtype).removeprefix('torch.')} tensor of {tensors[form].dim()} dimensions"
    kind, *parts = form
    if kind == "plain":
        return type(parts[0]).__name__
    if kind in ("tuple", "list") and all(isinstance(part, tuple) and part[0] == "plain" for part in parts):
        return f"a {kind} of plain values"  # as many as there are documents in it, say
    head = HEADERS.get(kind, 0)
    names = f" {parts[head - 1]}" if head and kind != "named" else ""
    return f"{kind}{names} of {', '.join(_kind(tensors, part) for part in parts[head:])}"


def lead_of(tensors: Sequence[Tensor], form: Any) -> list[Tensor | None]:
    """Return, of every microbatch, the first tensor with dimensions that is given for it alone.

    >>> import torch
    >>> [tuple(value.shape) for value in lead_of([torch.ones(2, 7), torch.ones(3, 4)], ("microbatches", 0, 1))]
    [(2, 7), (3, 4)]
    """
    listed = _apart_in(form)
    return [
        next((tensors[place] for each in listed for place in _places(each[at]) if tensors[place].dim()), None)
        for at in range(len(listed[0]))
    ]
