"""How much each part of a loss counts in a microbatch, from the labels that its calls really get.

              microbatch   0     1     2     3
    words that count      18    17     0     9      one mean: shares 18/44, 17/44, 0, 9/44
    sentences              2     2     1     1      a second mean: each is multiplied by its own factors

The targets of a loss are computed from the inputs by plain functions (shifted, flattened, clamped). Those calls are
written out as a function of the inputs, so that all microbatches can be counted before the first one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import BatchError
from drumline.model.graph.emit import Emitter
from drumline.model.graph.graph import Call
from drumline.model.loss.calls import Labels, arguments_of, name_of
from drumline.model.loss.terms import Term, Walk

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
    """Counts the parts of one graph's loss; `piece` holds parameters that weight classes."""

    def __init__(self, walk: Walk) -> None:
        graph, self.terms = walk.graph, walk.terms
        wanted = list(dict.fromkeys(value for term in self.terms for value in _needed(term)))
        _, calls = graph.origins(wanted)
        emitter = Emitter(graph)
        self._places = {value: at for at, value in enumerate(wanted)}
        # Return everything that is needed, including parameters and constants.
        returns = f"({''.join(f'{emitter.expression(None, [value])}, ' for value in wanted)})"
        self._run = emitter.function(graph.inputs, sorted(calls), returns, kept=wanted)

    def of(self, inputs: Sequence[Tensor], piece: Any = None) -> list[Count | None]:
        """Return what every part counts for these inputs; None for a sum, whose microbatches are added."""
        with torch.no_grad():
            made = self._run(piece, *inputs)
            return [self._count(term, made) for term in self.terms]

    def _count(self, term: Term, made: Sequence[Tensor]) -> Count | None:
        if term.labels is not None:
            target = made[self._places[term.labels.target]]
            if target.is_floating_point():
                return term.num_bytes  # class probabilities: every row counts
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
    """Return the number of labels that are not ignored, or the total weight of their classes.

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


def mixed_by(walk: Walk) -> list[str]:
    """Return the calls on the path to a loss that may not work row by row, for a closer look."""
    found = dict.fromkeys(
        name_of(walk.graph.calls[at])
        for term in walk.terms
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
    """Whether an index keeps the first dimension."""
    first = index[0] if isinstance(index, tuple) and index else index
    return first is ... or first == slice(None)


def _works_inside(call: Call) -> bool:
    """Whether a call names dimensions, none of which is the first."""
    args, kwargs = arguments_of(call)
    named = [kwargs[key] for key in ("dim", "axis", "dims") if key in kwargs] or list(args[1:])
    flat = [one for each in named for one in (each if isinstance(each, tuple | list) else [each])]
    dims = [one for one in flat if isinstance(one, int) and not isinstance(one, bool)]
    return bool(dims) and all(one == -1 or one >= 1 for one in dims)


@dataclass(frozen=True, slots=True)
class Weighing:
    """Each microbatch's share, and factors for parts of the loss if one share cannot be right for all of them."""

    shares: Sequence[Count]
    factors: Mapping[int, Sequence[float]] = field(default_factory=dict)


# Returns the totals of these counts over all lines of a mesh; every line calls it once a step.
Across = Callable[[list[Count]], list[Count]]


def weighed(
    counts: Sequence[Sequence[Count | None]], rows: Sequence[int], *, others: bool = False, across: Across | None = None
) -> Weighing:
    """Return the microbatches' shares from what every part counts in each, None for a sum.

    With `others`, parts of unknown kind, microbatches count by their rows. `across` returns what all lines of a mesh
    count together, of which these microbatches have their shares.

    >>> weighed([[3], [1]], [2, 2]).shares
    [0.75, 0.25]
    >>> weighed([[3, 2], [1, 2]], [2, 2])
    Weighing(shares=[0.5, 0.5], factors={0: [1.5, 1.0], 1: [0.5, 1.0]})
    >>> weighed([[None], [None]], [2, 2]).shares
    [1.0, 1.0]
    """
    columns = list(zip(*counts, strict=True))
    totals = [_total(column) for column in columns]
    num_rows: Count = sum(rows)
    if across is not None:
        *totals, num_rows = across([*totals, num_rows])
    if len(columns) == 1 and not others and any(isinstance(one, Tensor) and not one.is_cpu for one in columns[0]):
        return Weighing(_parts(columns[0], totals[0]))
    plain = [[_plain(one) for one in column] for column in columns]
    parts = [[float(one) for one in _parts(*each)] for each in zip(plain, map(float, totals), strict=True)]
    base = [one / float(num_rows) for one in rows]
    if not others and parts and all(_alike(parts[0], one) for one in parts[1:]):
        return Weighing(parts[0])
    if all(_alike(base, one) for one in parts):
        return Weighing(base)
    factors = {at: [column[at] / base[at] for column in parts] for at in range(len(rows))}
    return Weighing(base, factors)


def _total(column: Sequence[Count | None]) -> Count:
    """Return the total count of a part; 0 for a sum."""
    counts = [one for one in column if one is not None]
    return sum(counts[1:], start=counts[0]) if len(counts) == len(column) else 0.0


def _parts(column: Sequence[Count | None], total: Count) -> list[Count]:
    """Return each microbatch's part of the total count; those of a sum are added as they are."""
    counts = [one for one in column if one is not None]
    if len(counts) < len(column):
        return [1.0] * len(column)
    if not isinstance(total, Tensor) and not total > 0:
        raise BatchError(
            f"the microbatches' loss weights are {counts}", expected="numbers of at least 0, not all of them 0"
        )
    return [one / total for one in counts]


def _plain(count: Count | None) -> float | None:
    return None if count is None else float(count)


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))
