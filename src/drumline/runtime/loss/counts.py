"""How much each part of a loss counts in a microbatch: told from the labels that its calls really get.

What a loss compares with is made of the inputs by plain functions (shifted, flattened, clamped). Those calls are
written out as a function of the inputs, so that all microbatches can be counted before the first of them has run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.runtime.blocks.emit import Emitter
from drumline.runtime.blocks.graph import Call, Graph
from drumline.runtime.loss.terms import Labels, Term, Terms, Walk, arguments_of, name_of

Count = float | Tensor
_ROW_BY_ROW = {
    "view", "reshape", "flatten", "contiguous", "float", "to", "double", "half", "type", "type_as", "clone", "detach",
    "transpose", "permute", "squeeze", "unsqueeze", "__getitem__", "narrow", "select", "add", "__add__", "__radd__",
    "sub", "__sub__", "rsub", "__rsub__", "mul", "__mul__", "__rmul__", "div", "__truediv__", "pow", "__pow__", "tanh",
    "sigmoid", "relu", "gelu", "silu", "exp", "log", "abs", "neg", "__neg__", "clamp", "log_softmax", "softmax",
    "split", "chunk", "unbind", "cat", "stack", "interpolate", "linear", "layer_norm", "dropout", "tensor_split",
    "size", "dim", "mean", "sum", "masked_fill", "where", "logsigmoid", "square", "sqrt",
}  # fmt: skip
_ALONG = (
    "mean", "sum", "softmax", "log_softmax", "cat", "stack", "transpose", "permute", "split", "chunk", "unbind",
    "select", "narrow", "tensor_split",
)  # fmt: skip


class Counts:
    """Counts the parts of one graph's loss; `piece` is where a parameter that weighs classes is found."""

    def __init__(self, graph: Graph, terms: Terms, state: Callable[[str], str]) -> None:
        self.graph = graph
        self.terms = terms.known
        wanted = list(dict.fromkeys(value for term in self.terms for value in _needed(term)))
        self._order = [value for value in wanted if graph.is_carried(value)]
        _, calls = graph.origins(self._order)
        emitter = Emitter(graph, str, state)
        self._places = {value: at for at, value in enumerate(wanted)}
        # All that is wanted is returned, parameters and constants too.
        returns = f"({''.join(f'{emitter.expression(None, [value])}, ' for value in wanted)})"
        self._run = emitter.function(graph.inputs, sorted(calls), returns, kept=wanted)

    def of(self, inputs: Sequence[Tensor], piece: Any = None) -> list[Count | None]:
        """Return what every part counts for these inputs; None for a sum, of which all microbatches' are added."""
        with torch.no_grad():
            made = self._run(piece, *inputs)
            return [self._count(term, made) for term in self.terms]

    def _count(self, term: Term, made: Sequence[Tensor]) -> Count | None:
        if term.labels is not None:
            target = made[self._places[term.labels.target]]
            if target.is_floating_point():
                return term.num_bytes  # chances of classes: every row counts
            weight = None if term.labels.weight is None else made[self._places[term.labels.weight]]
            return labels_counted(target, term.labels.ignored, weight)
        if term.divided is not None:
            return made[self._places[term.divided]].detach().double().reshape(())
        return term.num_bytes


def _needed(term: Term) -> list[int]:
    labels: Labels | None = term.labels
    if labels is not None:
        return [labels.target] if labels.weight is None else [labels.target, labels.weight]
    return [] if term.divided is None else [term.divided]


def labels_counted(target: Tensor, ignored: int, weight: Tensor | None = None) -> Tensor:
    """Return how many labels are not ignored, or what their classes weigh together.

    >>> labels_counted(torch.tensor([1, -100, 0]), -100)
    tensor(2)
    >>> labels_counted(torch.tensor([1, 9]), 9, torch.tensor([2.0, 3.0]))
    tensor(3., dtype=torch.float64)
    """
    counts = target != ignored
    if weight is None:
        return counts.sum()
    classes = target.masked_fill(~counts, 0)
    return (weight.double()[classes] * counts).sum()


def mixed_by(walk: Walk, terms: Terms) -> list[str]:
    """Return the calls on the way to a loss that may not go row by row, for a closer look."""
    found = dict.fromkeys(
        name_of(walk.graph.calls[at])
        for term in terms.known
        for at in walk.data_calls(term)
        if not _is_row_by_row(walk, at)
    )
    return list(found)


def _is_row_by_row(walk: Walk, at: int) -> bool:
    call = walk.graph.calls[at]
    name = name_of(call)
    if name not in _ROW_BY_ROW or call.changes:
        return False
    if name == "__getitem__":
        return _keeps_rows(arguments_of(call)[0][1])
    return name not in _ALONG or _works_inside(call)


def _keeps_rows(index: Any) -> bool:
    """Whether an index leaves the first dimension as it is."""
    first = index[0] if isinstance(index, tuple) and index else index
    return first is ... or first == slice(None)


def _works_inside(call: Call) -> bool:
    """Whether a call names dimensions, all of them behind the first."""
    args, kwargs = arguments_of(call)
    named = [kwargs[key] for key in ("dim", "axis", "dims") if key in kwargs] or list(args[1:])
    flat = [one for each in named for one in (each if isinstance(each, tuple | list) else [each])]
    dims = [one for one in flat if isinstance(one, int) and not isinstance(one, bool)]
    return bool(dims) and all(one == -1 or one >= 1 for one in dims)
