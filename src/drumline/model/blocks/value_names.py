"""Names for the values of a graph that are the same on every rank, in whatever order the model created them.

A value's name says how it is computed: the function or block, and the names of its arguments. So two ranks agree on
what crosses a cut, even if the model iterates over a set of strings, whose order differs between processes. Two values
with the same name are equal, so it does not matter which is which. An in-place change gives a value another name. Calls
of blocks, and calls that draw random numbers, are numbered, because their order matters.

    "cos of (input 1 ...)"  ──►  3f0c...      rank 0 made it as value 7, rank 1 as value 9
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from drumline.model.graph.graph import Call, CallGraph, Crossing, may_draw

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_MOST_ELEMENTS = 4096  # of a constant are compared


def short(text: str) -> str:
    """Return a short name for a text.

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
        self._versions: dict[int, str] = {}  # in-place changes of each storage
        self._counts: dict[str, int] = {}
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
        count = self._counts[name] = self._counts.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def now(self, number: int) -> str:
        """Return a value's name, including in-place changes so far."""
        changed = self._versions.get(self.graph.values[number].storage, "")
        return f"{self.values[number]}!{changed}" if changed else self.values[number]

    def spelled(self, form: Any, takes: Sequence[int]) -> str:
        """Return a form with the names of its values; the order of a dict's keys does not matter."""
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
    """Return the name of a function, the same in every process.

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
    """Return what identifies a constant: its kind and its values, or some of them if it is long."""
    if not isinstance(tensor, Tensor):
        return short(_ADDRESS.sub("", repr(tensor)))
    text = f"{tensor.dtype} {tuple(tensor.shape)}"
    if tensor.device.type != "cpu" or type(tensor) not in (Tensor, torch.nn.Parameter):
        return text
    flat = tensor.detach().reshape(-1)
    flat = flat[:: max(1, flat.numel() // _MOST_ELEMENTS)].contiguous()
    return f"{text} {blake2b(flat.view(torch.uint8).numpy().tobytes(), digest_size=8).hexdigest()}"


def by_name(crossing: Crossing, names: Names) -> Crossing:
    """Return a crossing with its values in order of their names, which is the same on every rank."""
    whole, sent = (tuple(sorted(entry, key=names.now)) for entry in (crossing.whole, crossing.sent))
    return Crossing(whole, sent, crossing.again)


def described(names: Names, pieces: Sequence[str], calls: Sequence[range], cuts: Sequence[Crossing]) -> list[str]:
    """Return the code as lines for comparing ranks: what each piece calls, and what crosses into it."""
    graph = names.graph
    lines: list[str] = []
    for piece, inside, crossing in zip(pieces, calls, cuts, strict=True):
        lines += [f"{piece} takes {graph.values[value].kind} {names.values[value]}" for value in crossing.sent]
        makers = [
            (names.calls[at], graph.calls[at].block or function_name(graph.calls[at].function))
            for at in inside
            if at not in graph.idle
        ]
        lines += [f"{piece} calls {what} ({name})" for name, what in sorted(makers)]
    lines.append(f"the model returns {names.spelled(graph.output_form, graph.outputs)}")
    return lines


def shortened(lines: Sequence[str]) -> list[str]:
    """Return one line that stands for many.

    >>> digest_of(shortened(["a", "b"])) == digest_of(["a", "b"])
    True
    """
    return [f"#{digest_of(lines)}"]


def digest_of(lines: Sequence[str]) -> str:
    """Return a short name for the code of one kind of input."""
    if len(lines) == 1 and lines[0].startswith("#"):
        return lines[0][1:]
    return short("\n".join(lines))


def kind_text(*kind: Any) -> str:
    """Return a short name for a kind of input.

    >>> kind_text(None, (), True) == kind_text(None, (), True), kind_text(None, (), True) == kind_text(None, (), False)
    (True, False)
    """
    return short(_ADDRESS.sub("", " ".join(map(str, kind))))
