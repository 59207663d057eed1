"""A loss function while it runs: its calls into torch form a graph like that of a traced model.

The graph shows which numbers are added up to the loss, and which masks and counts come from the targets alone. It also
shows which numbers the function reads on the host, where tracing cannot follow them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from drumline.model.graph.graph import Call, CallGraph, Value, may_draw
from drumline.model.values import found_in, pack, tensors_in

_READS = {
    "tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "__contains__",
    "__complex__", "equal", "is_nonzero",
}  # fmt: skip
_CHOOSES = {"masked_select", "index_select", "take", "__getitem__"}  # by their second argument
_SHAPES = {"masked_select", "nonzero", "argwhere", "unique", "unique_consecutive", "bincount", "repeat_interleave"}
_SORTS = {"topk", "kthvalue", "nonzero", "sort", "argsort", "msort"}


@dataclass(slots=True)
class LossCall:
    """What was seen of one call of a loss function."""

    loss: Any
    graph: CallGraph
    num_outputs: int  # how many of the graph's inputs belong to the output
    tensors: list[Tensor]  # by the numbers of values
    # Of results with one element: the place in the graph and the value, as they were when made.
    scalars: dict[int, tuple[GradientEdge, Tensor]]
    reads: list[tuple[str, int]]  # what was read on the host, and of which value
    is_again: bool = False  # whether its calls are those of another run, call by call

    @property
    def targets(self) -> list[int]:
        """The inputs that belong to the target."""
        return self.graph.inputs[self.num_outputs :]


def watched(
    loss_fn: Callable[..., Any],
    output: Any,
    target: Any,
    like: CallGraph | None = None,
    drawing: AbstractContextManager[object] | None = None,
) -> LossCall:
    """Call a loss function, and return its value and its calls.

    If these are those of another run, `like`, they are taken from there, which is quicker. Calls that may draw random
    numbers run inside of `drawing`.

    >>> from torch.nn.functional import mse_loss
    >>> call = watched(mse_loss, torch.zeros(2), torch.ones(2))
    >>> call.loss, [call.function.__name__ for call in call.graph.calls], call.graph.outputs
    (tensor(1.), ['mse_loss'], (2,))
    """
    watch = _CallWatch(like, drawing)
    outputs, _ = pack(output)
    for tensor in (*outputs, *pack(target)[0]):
        if id(tensor) not in watch.numbers:
            watch.graph.inputs.append(watch.new(tensor))
    with watch:
        loss = loss_fn(output, target)
    if isinstance(loss, Tensor):
        watch.graph.outputs = (watch.number(loss),)
    count = len({id(value) for value in outputs})
    graph = watch.graph
    is_again = like is not None and (graph.inputs, graph.outputs) == (like.inputs, like.outputs)
    is_again = is_again and list(map(id, graph.calls)) == list(map(id, watch.like))
    return LossCall(loss, graph, count, watch.tensors, watch.scalars, watch.reads, is_again)


class _CallWatch(TorchFunctionMode):
    def __init__(self, like: CallGraph | None, drawing: AbstractContextManager[object] | None) -> None:
        super().__init__()
        self.drawing = drawing
        self.graph = CallGraph()
        self.like = [] if like is None else like.calls
        self.numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []  # by number, and kept alive, so that no id is reused
        self.scalars: dict[int, tuple[GradientEdge, Tensor]] = {}
        self.reads: list[tuple[str, int]] = []

    def new(self, tensor: Tensor, constant: Any = None) -> int:
        number = len(self.graph.values)
        self.graph.values.append(Value(tensor.nbytes, number, constant=constant))
        self.numbers[id(tensor)] = number
        self.tensors.append(tensor)
        return number

    def number(self, tensor: Tensor) -> int:
        """Return the value of a tensor; one that existed before is a constant."""
        number = self.numbers.get(id(tensor))
        return self.new(tensor, constant=tensor) if number is None else number

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        tensors = tensors_in((args, named))
        versions = [tensor._version for tensor in tensors]
        if self.drawing is not None and ("generator" in named or may_draw(func)):
            with self.drawing:
                result = func(*args, **named)
        else:
            result = func(*args, **named)
        with torch._C.DisableTorchFunction():
            name = getattr(func, "__name__", "")
            if name in _READS:
                self.reads += [(name, self.number(tensor)) for tensor in tensors]
            changed = [tensor for tensor, before in zip(tensors, versions, strict=True) if tensor._version != before]
            fresh = [(path, tensor) for path, tensor in found_in(result) if id(tensor) not in self.numbers]
            if changed or fresh:
                self._note(func, (args, named), tensors, changed, fresh)
        return result

    def _note(self, func: Any, arguments: Any, given_tensors: list[Tensor], changed: list[Tensor], fresh: Any) -> None:
        takes = tuple(dict.fromkeys(self.number(tensor) for tensor in given_tensors))
        makes = tuple((path, self.new(tensor)) for path, tensor in fresh if id(tensor) not in self.numbers)
        changes = tuple(self.numbers[id(tensor)] for tensor in changed)
        at = len(self.graph.calls)
        same = self.like[at] if at < len(self.like) else None
        if same is None or (same.function, same.takes, same.makes, same.changes) != (func, takes, makes, changes):
            tensors, form = pack(arguments)
            same = Call(func, "", form, tuple(self.number(tensor) for tensor in tensors), makes, changes)
        self.graph.calls.append(same)
        for _, number in makes:
            tensor = self.tensors[number]
            if tensor.requires_grad and tensor.numel() == 1:
                self.scalars[number] = get_gradient_edge(tensor), tensor.detach().clone()


@dataclass(frozen=True, slots=True)
class KnownValues:
    """The values of a loss that come from the targets alone, even if they were changed in place on the way."""

    values: frozenset[int]
    changes: dict[int, tuple[int, ...]] = field(default_factory=dict)  # by value: the calls that change it

    @staticmethod
    def of(graph: CallGraph, inputs: Collection[int]) -> KnownValues:
        """Follow what plain functions make of the targets."""
        known, changes = set(inputs), dict[int, tuple[int, ...]]()
        for at, call in enumerate(graph.calls):
            fits = not may_draw(call.function) and all(n in known or not graph.is_carried(n) for n in call.takes)
            if fits:
                known.update(number for _, number in call.makes)
                for change in call.changes:
                    changes[change] = (*changes.get(change, ()), at)
            else:
                known.difference_update(call.changes)
        return KnownValues(frozenset(known), changes)


def reads_targets(call: LossCall, known: KnownValues) -> list[str]:
    """Return how the function reads numbers of its targets on the host, where nobody can follow them.

    A loss that is read, to be logged, is none of the targets. What a function decides by its outputs is.
    """
    names = [
        name
        for name, value in call.reads
        if value in known.values or name in ("__bool__", "__contains__", "equal", "is_nonzero")
        or (call.tensors[value].numel() > 1 and call.graph.is_carried(value))
    ]  # fmt: skip
    return list(dict.fromkeys(names))


def picks_by_outputs(seen_call: LossCall, known: KnownValues) -> list[str]:
    """Return the calls that choose what counts by the model's outputs."""
    names = []
    for call in seen_call.graph.calls:
        name = getattr(call.function, "__name__", "")
        unknown = [number for number in call.takes if number not in known.values and seen_call.graph.is_carried(number)]
        if name in _CHOOSES:
            unknown = [number for number in unknown if number in call.takes[1:]]
        elif name not in _SORTS or (call.takes and seen_call.tensors[call.takes[0]].dim() != 1):  # inside of rows
            continue
        if unknown:
            names.append(name)
    return list(dict.fromkeys(names))


def shapes_by_values(seen_call: LossCall) -> list[str]:
    """Return the calls whose results have shapes that depend on values, by which a function may decide what it does."""
    names = []
    for call in seen_call.graph.calls:
        name = getattr(call.function, "__name__", "")
        masks = name == "__getitem__" and any(
            seen_call.tensors[number].dtype is torch.bool for number in call.takes[1:]
        )
        if masks or name in _SHAPES:
            names.append(name)
    return list(dict.fromkeys(names))
