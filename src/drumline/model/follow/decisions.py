"""What a forward reads of integer inputs between its blocks: each microbatch decides anew, before it runs.

    if labels.max() >= vocabulary: raise      read of an input alone: asked again for the inputs of every microbatch
    if x.mean() > 0:                          read of what a block returned: nobody knows it before the block runs

The answers belong to the kind of the inputs, so that inputs with other answers are traced again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.model.graph.emit import Emitter
from drumline.model.graph.graph import CallGraph

Answer = int | bool
Ask = Callable[[Sequence[Tensor]], Answer]
_READ: dict[str, Callable[[Any], Answer]] = {
    "__bool__": bool,
    "__int__": int,
    "__index__": int,
    "item": lambda tensor: tensor.item(),
}
_MOST = 8  # more of them are rather traced with the numbers of the inputs, if these are few


class DataDependentRead(Exception):
    """A tensor's values are read as a whole, where only a stand-in for it is at hand."""


class Undecided(ModelError):
    """The forward reads of its integer inputs what is not known yet; `ask` returns it for given inputs."""

    def __init__(self, error: str, ask: Ask, *, expected: str = "", fix: str = "") -> None:
        self.ask = ask
        super().__init__(error, expected=expected, fix=fix)


def asked(name: str, graph: CallGraph, value: int, inputs: Sequence[Tensor], num_decided: int) -> Ask | None:
    """Return how to read a value for other inputs; None unless plain functions compute it from integer inputs."""
    if name not in _READ or num_decided >= _MOST:
        return None
    # A copy: the graph goes on, and what is found out about it so far is remembered.
    part = CallGraph(list(graph.values), list(graph.inputs), list(graph.calls), outputs=(value,))
    if value not in part.repeatable:
        return None
    origins, calls = part.origins([value])
    if not origins or any(inputs[part.inputs.index(origin)].is_floating_point() for origin in origins):
        return None
    emitter = Emitter(part)
    run = emitter.function(part.inputs, sorted(calls), emitter.expression(None, [value]), kept_values=[value])
    read = _READ[name]

    def ask(tensors: Sequence[Tensor]) -> Answer:
        with torch.no_grad():
            return read(run(None, *tensors))

    return ask
