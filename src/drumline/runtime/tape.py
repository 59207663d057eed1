"""The split backward: I makes only what the previous stage waits for, W makes the weight gradients later.

While a microbatch that is to be split runs forward, every module that owns parameters (an owner) computes with
stand-ins of them: the same memory, but not known to autograd as the parameters. It leaves a record on the tape.

    F   x ──► Linear ──► GELU ──► Linear ──► y          records: (owner, its input, its place in the graph)
    I   gradient of y ──► ... ──► gradient of x         and, in passing, the gradient at every record's place
    W   each record: its input and gradient ──► weight gradients

So I is one call of autograd, which skips weight gradients because nobody asks for them, and W is plain matrix products
without any graph. No graph is ever walked in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node

if TYPE_CHECKING:
    from drumline.runtime.owners import Owner

Gradients = list[tuple[nn.Parameter, Tensor]]


class Record:
    """One call of one owner: what it took, where its output stands in the graph, and later the gradient there."""

    __slots__ = ("form", "gradient", "inputs", "node", "owner", "version")

    def __init__(self, owner: Owner, inputs: Any, node: Node | None, version: int = 0) -> None:
        self.owner = owner
        self.inputs = inputs
        self.node = node
        self.version = version
        self.gradient: Any = None
        self.form: Any = None


class Tape:
    """The records of one microbatch's forward through one stage, and what I found early."""

    __slots__ = ("early", "records")

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.early: Gradients = []

    def backward_input(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        leaves: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `leaves`; the records' own are kept for `weight_gradients`."""
        taped = [record for record in self.records if record.node is not None]
        places = [GradientEdge(cast(Node, record.node), 0) for record in taped]
        asked = cast(Sequence[Tensor], [*leaves, *places, *parameters])  # edges and tensors may be mixed
        found = torch.autograd.grad(roots, asked, gradients, allow_unused=True)
        first, last = len(leaves), len(leaves) + len(taped)
        for record, gradient in zip(taped, found[first:last], strict=True):
            record.gradient = gradient
            record.node = None
        self.early += [(one, grad) for one, grad in zip(parameters, found[last:], strict=True) if grad is not None]
        return found[:first]

    @torch.no_grad()
    def weight_gradients(self) -> Gradients:
        """Return the gradient of every parameter that the microbatch reached, and forget the records."""
        total: dict[nn.Parameter, Tensor] = {}
        # Last used, first added: the order in which autograd sums the uses of one parameter.
        for record in reversed(self.records):
            if record.gradient is not None:
                for parameter, gradient in record.owner.gradients(record):
                    total[parameter] = gradient if parameter not in total else total[parameter] + gradient
        for parameter, gradient in self.early:
            total[parameter] = gradient if parameter not in total else total[parameter] + gradient
        self.records = []
        self.early = []
        return list(total.items())


def merged(tapes: Sequence[Tape]) -> Gradients:
    """Return the summed weight gradients of several microbatches; a linear layer's as one larger product."""
    first, *others = tapes
    alike = all([one.owner for one in tape.records] == [one.owner for one in first.records] for tape in others)
    if not others or not alike:
        return [pair for tape in tapes for pair in tape.weight_gradients()]
    whole = Tape()
    whole.early = [pair for tape in tapes for pair in tape.early]
    for calls in zip(*(tape.records for tape in tapes), strict=True):
        calls = tuple(call for call in calls if call.gradient is not None)
        whole.records += [calls[0].owner.joined(calls)] if len(calls) > 1 and calls[0].owner.joins else calls
    for tape in tapes:
        tape.records, tape.early = [], []
    return whole.weight_gradients()


def accumulate(gradients: Gradients) -> None:
    """Add to the parameters' `.grad`, as autograd would.

    >>> weight = nn.Parameter(torch.zeros(2))
    >>> accumulate([(weight, torch.ones(2))]); accumulate([(weight, torch.ones(2))])
    >>> weight.grad
    tensor([2., 2.])
    """
    sums: list[Tensor] = []
    added: list[Tensor] = []
    for parameter, gradient in gradients:
        if parameter.grad is None:
            own = gradient.is_contiguous() and gradient._base is None
            parameter.grad = gradient if own else gradient.contiguous().clone()
        else:
            sums.append(parameter.grad)
            added.append(gradient)
    if sums:
        with torch.no_grad():
            torch._foreach_add_(sums, added)
