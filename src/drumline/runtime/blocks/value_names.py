"""Names for the values of a graph that are the same on every rank, in whatever order the model made them.

A value is named by what it is made of: the function or block, and the names of what goes into it. So two ranks agree on
what crosses a cut although a model's code went through a set of strings, whose order is another in every process. Two
values with one name are equal, so it does not matter which of them is which. What a call changes in place has another
name afterwards; calls of blocks, and those that draw random numbers, are numbered, since their order does count.

    "cos of (input 1 ...)"  ──►  3f0c...      rank 0 made it as value 7, rank 1 as value 9
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from drumline.runtime.blocks.graph import Call, CallGraph, Crossing, may_draw

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_ELEMENTS = 4096  # of a constant are looked at


def short(text: str) -> str:
    """Return a short name that stands for a text.

    >>> short("a") == short("a"), short("a") == short("b"), len(short("a"))
    (True, False, 16)
    """
    return blake2b(text.encode(), digest_size=8).hexdigest()


class Names:
    """The names of a graph's values and calls."""

    def __init__(self, graph: CallGraph) -> None:
        self.graph = graph
        self.values = [""] * len(graph.values)
        self.calls: list[str] = []
        self._versions: dict[int, str] = {}  # what was done to a storage in place
        self._seen: dict[str, int] = {}
        self._num_drawn = 0
        for number, value in enumerate(graph.values):
            if value.state:
                self.values[number] = f"state {value.state}"
            elif value.constant is not None:
                self.values[number] = f"constant {_contents(value.constant)}"
        for at, number in enumerate(graph.inputs):
            self.values[number] = f"input {at}"
        for call in graph.calls:
            self._name(call)

    def _name(self, call: Call) -> None:
        text = f"{self.spelled(call.form, call.takes)} grad={call.has_grad} autocast={call.autocast}"
        if call.block:
            text = self._once(f"block {call.block} {text}")
        else:
            text = f"{function_name(call.function)} {text}"
            if may_draw(call.function):
                self._num_drawn += 1
                text = f"draw {self._num_drawn}: {text}"
        name = short(text)
        self.calls.append(name)
        for path, number in call.makes:
            self.values[number] = short(f"{name} {path!r}")
        for number in call.changes:
            self._versions[self.graph.values[number].storage] = name

    def _once(self, name: str) -> str:
        """Return a name that no other call has: the second of the same kind is `name#2`."""
        count = self._seen[name] = self._seen.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def now(self, number: int) -> str:
        """Return a value's name, and what was done to it in place by now."""
        changed = self._versions.get(self.graph.values[number].storage, "")
        return f"{self.values[number]}!{changed}" if changed else self.values[number]

    def spelled(self, form: Any, takes: Sequence[int]) -> str:
        """Return a form with the names of its values, in which the order of a dict's keys does not count."""
        if form is None or isinstance(form, int):
            return f"<{self.now(takes[form or 0])}>"
        kind, *parts = form
        if kind == "plain":
            return _ADDRESS.sub("", repr(parts[0])) if not callable(parts[0]) else function_name(parts[0])
        if kind in ("dict", "mapping", "fields"):
            named, *inside = parts if kind == "dict" else parts[1:]
            pairs = sorted(f"{key!r}: {self.spelled(part, takes)}" for key, part in zip(named, inside, strict=True))
            return f"{kind}{{{', '.join(pairs)}}}"
        if kind == "named":
            parts = parts[1:]
        return f"{kind}({', '.join(self.spelled(part, takes) for part in parts)})"


def function_name(function: Any) -> str:
    """Return what a function is called, the same in every process.

    >>> function_name(torch.add), function_name(Tensor.add_)
    ('torch._VariableFunctionsClass.add', 'torch._C.TensorBase.add_')
    """
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if name is None:
        return _ADDRESS.sub("", repr(function))
    home = getattr(function, "__module__", None) or getattr(getattr(function, "__objclass__", None), "__module__", "")
    owner = getattr(getattr(function, "__self__", None), "__qualname__", "")
    return f"{home}.{owner}.{name}" if owner else f"{home or 'torch'}.{name}"


def _contents(tensor: Any) -> str:
    """Return what tells a constant from others: its kind and its numbers, of a long one some."""
    if not isinstance(tensor, Tensor):
        return short(_ADDRESS.sub("", repr(tensor)))
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.device.type != "cpu" or type(tensor) not in (Tensor, torch.nn.Parameter):
        return text
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].contiguous()
    return f"{text} {blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()}"


def by_name(crossing: Crossing, names: Names) -> Crossing:
    """Return a crossing whose values stand in the order of their names, which is the same on every rank."""
    whole, sent = (tuple(sorted(one, key=names.now)) for one in (crossing.whole, crossing.sent))
    return Crossing(whole, sent, crossing.again)


def described(names: Names, pieces: Sequence[str], calls: Sequence[range], cuts: Sequence[Crossing]) -> list[str]:
    """Return what was written, in lines that ranks compare: what each piece calls, and what crosses into it."""
    graph = names.graph
    lines: list[str] = []
    for piece, inside, crossing in zip(pieces, calls, cuts, strict=True):
        lines += [f"{piece} takes {graph.values[value].kind} {names.values[value]}" for value in crossing.sent]
        made = [
            (names.calls[at], graph.calls[at].block or function_name(graph.calls[at].function))
            for at in inside
            if at not in graph.idle
        ]
        lines += [f"{piece} calls {what} ({name})" for name, what in sorted(made)]
    lines.append(f"the model returns {names.spelled(graph.output_form, graph.outputs)}")
    return lines


def kind_text(*kind: Any) -> str:
    """Return a short name for a kind of input.

    >>> kind_text(None, (), True) == kind_text(None, (), True), kind_text(None, (), True) == kind_text(None, (), False)
    (True, False)
    """
    return short(_ADDRESS.sub("", " ".join(map(str, kind))))
