"""A loss function watched while it runs: its calls into torch, as the graph that a followed model would have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from drumline.runtime.blocks.graph import Call, Graph, Value
from drumline.runtime.values import found_in, pack, tensors_in


def watched(loss_fn: Callable[..., Tensor], output: Any, target: Any) -> tuple[Tensor, Graph, int]:
    """Call a loss function and return its value, its calls, and how many of the graph's inputs are the output's.

    >>> from torch.nn.functional import mse_loss
    >>> loss, graph, _ = watched(mse_loss, torch.zeros(2), torch.ones(2))
    >>> loss, [call.function.__name__ for call in graph.calls], graph.outputs
    (tensor(1.), ['mse_loss'], (2,))
    """
    watch = _Watch()
    outputs, _ = pack(output)
    for tensor in (*outputs, *pack(target)[0]):
        if id(tensor) not in watch.numbers:
            watch.graph.inputs.append(watch.new(tensor))
    with watch:
        loss = loss_fn(output, target)
    if isinstance(loss, Tensor):
        watch.graph.outputs = (watch.number(loss),)
    return loss, watch.graph, len({id(one) for one in outputs})


class _Watch(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        self.numbers: dict[int, int] = {}
        self.kept: list[Any] = []  # so that no id is taken twice

    def new(self, tensor: Tensor, constant: Any = None) -> int:
        number = len(self.graph.values)
        self.graph.values.append(Value(tensor.nbytes, number, constant=constant))
        self.numbers[id(tensor)] = number
        self.kept.append(tensor)
        return number

    def number(self, tensor: Tensor) -> int:
        """Return a tensor's value; one that was there before is a constant."""
        found = self.numbers.get(id(tensor))
        return self.new(tensor, constant=tensor) if found is None else found

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = tensors_in((args, named))
        versions = [one._version for one in given]
        made = func(*args, **named)
        with torch._C.DisableTorchFunction():
            changed = [one for one, before in zip(given, versions, strict=True) if one._version != before]
            fresh = [(path, one) for path, one in found_in(made) if id(one) not in self.numbers]
            if changed or fresh:
                self._note(func, args, named, changed, fresh)
        return made

    def _note(self, func: Any, args: Any, kwargs: Any, changed: list[Tensor], fresh: Any) -> None:
        tensors, form = pack((args, kwargs))
        takes = tuple(self.number(one) for one in tensors)
        makes = tuple((path, self.new(one)) for path, one in fresh if id(one) not in self.numbers)
        changes = tuple(self.numbers[id(one)] for one in changed)
        self.graph.calls.append(Call(func, "", form, takes, makes, changes))
