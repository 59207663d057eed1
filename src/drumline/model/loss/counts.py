"""How much each part of a loss counts in a microbatch, from the labels that its calls really get.

              microbatch   0     1     2     3
    words that count      18    17     0     9      one mean: shares 18/44, 17/44, 0, 9/44
    sentences              2     2     1     1      a second mean: each is multiplied by its own factors

The targets of a loss are computed from the inputs by plain functions (shifted, flattened, clamped). Those calls are
written out as a function of the inputs, so that all microbatches can be counted before the first one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import BatchError
from drumline.model.graph.emit import Emitter
from drumline.model.graph.graph import Call, CallGraph
from drumline.model.loss.calls import Elements, Labels, Tally, arguments_of, name_of
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


class Counter:
    """The values of a graph that some tallies count, written out as a function of its inputs."""

    def __init__(self, graph: CallGraph, tallies: Sequence[Tally], calls: Callable[[list[int]], Iterable[int]]) -> None:
        wanted = list(dict.fromkeys(value for tally in tallies for value in values_of(tally)))
        emitter = Emitter(graph)
        self._places = {value: at for at, value in enumerate(wanted)}
        # Return everything that is needed, including parameters and constants.
        returns = f"({''.join(f'{emitter.expression(None, [value])}, ' for value in wanted)})"
        self._run = emitter.function(graph.inputs, sorted(calls(wanted)), returns, kept_values=wanted)

    def values(self, inputs: Sequence[Tensor], piece: Any = None) -> Callable[[int], Tensor]:
        """Return a function that returns the values for these inputs, by number."""
        values_made = self._run(piece, *inputs)
        return lambda value: values_made[self._places[value]]


class Counts:
    """Counts the parts of one graph's loss; `piece` holds parameters that weight classes."""

    def __init__(self, walk: Walk) -> None:
        graph, self.terms = walk.graph, walk.terms
        tallies = [term.tally for term in self.terms if term.tally is not None]
        self._counter = Counter(graph, tallies, lambda wanted: graph.origins(wanted)[1])

    def of(self, inputs: Sequence[Tensor], piece: Any = None) -> list[Count | None]:
        """Return what every part counts for these inputs; None for a sum, whose microbatches are added."""
        with torch.no_grad():
            value_of = self._counter.values(inputs, piece)
            return [_count(term, value_of) for term in self.terms]


def _count(term: Term, value_of: Callable[[int], Tensor]) -> Count | None:
    if term.tally is None:
        return term.num_bytes
    if isinstance(term.labels, Labels) and value_of(term.labels.target).is_floating_point():
        # Class probabilities: every row counts.
        return value_of(term.labels.target).numel() if term.is_uneven else term.num_bytes
    return counted(term.tally, value_of)


def counted(tally: Tally, value_of: Callable[[int], Tensor]) -> Tensor:
    """Return what a tally counts of these values."""
    if isinstance(tally, Elements):
        return torch.tensor(value_of(tally.value).numel())
    if not isinstance(tally, Labels):
        return value_of(tally).detach().double().sum()
    weight = None if tally.weight is None else value_of(tally.weight)
    return labels_counted(value_of(tally.target), tally.ignored, weight)


def values_of(tally: Tally) -> list[int]:
    """Return the values that a tally counts."""
    if not isinstance(tally, Labels):
        return [tally.value if isinstance(tally, Elements) else tally]
    return [tally.target] if tally.weight is None else [tally.target, tally.weight]


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
    names = dict.fromkeys(
        name_of(walk.graph.calls[at])
        for term in walk.terms
        for at in walk.data_calls(term)
        if not _is_row_by_row(walk, at)
    )
    return list(names)


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
    flat = [value for each in named for value in (each if isinstance(each, tuple | list) else [each])]
    dims = [number for number in flat if isinstance(number, int) and not isinstance(number, bool)]
    return bool(dims) and all(dim == -1 or dim >= 1 for dim in dims)


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
    if len(columns) == 1 and not others and any(isinstance(value, Tensor) and not value.is_cpu for value in columns[0]):
        return Weighing(_parts(columns[0], totals[0]))
    plain = [[_plain(value) for value in column] for column in columns]
    parts = [[float(part) for part in _parts(*each)] for each in zip(plain, map(float, totals), strict=True)]
    return joined(parts, [row / float(num_rows) for row in rows], others=others)


def joined(parts: Sequence[Sequence[float]], base: Sequence[float], *, others: bool) -> Weighing:
    """Return the parts' shares as one if they are alike; else `base`, which `others` have, and factors to each."""
    if not others and parts and all(alike(parts[0], part) for part in parts[1:]):
        return Weighing(parts[0])
    if all(alike(base, part) for part in parts):
        return Weighing(base)
    factors = {at: [_over(column[at], own_count) for column in parts] for at, own_count in enumerate(base)}
    return Weighing(base, factors)


def _over(share: float, base: float) -> float:
    if base:
        return share / base
    if share:
        raise BatchError(
            "a microbatch counts in one part of the loss, and nothing in another of unknown kind",
            expected="parts of the loss that count the same labels",
            fix="pass loss_weight=, a function from a target to its weight",
        )
    return 0.0


def _total(column: Sequence[Count | None]) -> Count:
    """Return the total count of a part; 0 for a sum."""
    counts = [value for value in column if value is not None]
    return sum(counts[1:], start=counts[0]) if len(counts) == len(column) else 0.0


def _parts(column: Sequence[Count | None], total: Count) -> list[Count]:
    """Return each microbatch's part of the total count; those of a sum are added as they are."""
    counts = [value for value in column if value is not None]
    if len(counts) < len(column):
        return [1.0] * len(column)
    if not isinstance(total, Tensor) and not total > 0:
        raise BatchError(
            f"the microbatches' loss weights are {counts}", expected="numbers of at least 0, not all of them 0"
        )
    return [count / total for count in counts]


def _plain(count: Count | None) -> float | None:
    return None if count is None else float(count)


def alike(row: Sequence[float], other: Sequence[float], near: float = 1e-9) -> bool:
    """Whether numbers are equal, up to rounding.

    >>> alike([1.0, 0.3], [1.0, 0.1 + 0.2])
    True
    """
    return all(abs(a - b) <= near * max(abs(a), abs(b)) for a, b in zip(row, other, strict=True))
