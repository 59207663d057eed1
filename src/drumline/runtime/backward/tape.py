"""The split backward: I computes only what the previous stage waits for, W computes the weight gradients later.

While the forward of such a microbatch runs, every module that owns parameters (an owner) computes with stand-ins of
them: the same memory, but not known to autograd as parameters. It leaves a record on the tape.

    F   x ──► Linear ──► GELU ──► Linear ──► y          records: (owner, its input, its place in the graph)
    I   gradient of y ──► ... ──► gradient of x         and, on the way, the gradient at every record's place
    W   each record: its input and gradient ──► weight gradients

So I is one call of autograd, which skips weight gradients because nobody requests them. W is plain matrix products
without any graph. Python never walks a graph.

We call autograd's engine directly: `torch.autograd.backward` and `grad` check their arguments in Python, which takes
some 60 microseconds per call, as much as a small layer. The engine itself checks shapes and dtypes, and all its
arguments here come from a stage.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from drumline.core.errors import ModelError
from drumline.model.precision import gradient_dtype

_run: Any = torch._C._ImperativeEngine().run_backward  # the original, even if other code replaced torch's


def add_gradients(roots: Sequence[GradientEdge], gradients: Sequence[Tensor]) -> None:
    """Add the gradients of everything below `roots` to the leaves.

    >>> from torch.autograd.graph import get_gradient_edge
    >>> x = torch.ones(2, requires_grad=True)
    >>> add_gradients([get_gradient_edge(x * 3)], [torch.ones(2)])
    >>> x.grad
    tensor([3., 3.])
    """
    _run(tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_at(
    places: Sequence[GradientEdge | Tensor],
    roots: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    *,
    keep: bool = False,
) -> tuple[Tensor | None, ...]:
    """Return the gradients at `places`, None if none arrives, computing only what leads to them.

    With `keep`, the graph stays for more gradients.

    >>> from torch.autograd.graph import get_gradient_edge
    >>> x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> gradients_at([x, w], [get_gradient_edge(x * 3)], [torch.ones(2)])
    (tensor([3., 3.]), None)
    """
    tensors: tuple[Tensor | None, ...] = _run(
        tuple(roots), tuple(gradients), keep, False, tuple(places), allow_unreachable=True, accumulate_grad=False
    )
    return tensors


Gradients = list[tuple[nn.Parameter, Tensor]]

_of_thread = threading.local()


def running() -> Tape | None:
    """Return the tape whose I is running, so that compiled code can leave a record on it."""
    tape: Tape | None = getattr(_of_thread, "tape", None)
    return tape


def changed_in_place(what: str, why: str = "") -> ModelError:
    """Return the error for a weight gradient whose tensors have changed since the forward used them."""
    return ModelError(
        f"{what} was changed in place after it was used{f', {why}' if why else ''}",
        expected="tensors that stay unchanged until their backward has run",
        fix="write x = x + y instead of x += y",
    )


class Owner(ABC):
    """The owner of the parameters of a record: a module, or a compiled piece of code."""

    by_autograd = False  # whether autograd computes the gradients and runs the parameters' hooks

    @abstractmethod
    def gradients(self, record: OwnerCall) -> Gradients:
        """Return the weight gradients of one call."""

    def joined(self, records: Sequence[OwnerCall]) -> Sequence[OwnerCall]:
        """Merge the records of several microbatches into fewer, if that gives one larger product."""
        return records


@dataclass(slots=True, eq=False)
class OwnerCall:
    """One call of one owner: its input, the places of its outputs in the graph, and later the gradients there."""

    owner: Owner
    inputs: Any
    places: Sequence[GradientEdge]
    version: int = 0
    gradients: Sequence[Tensor | None] = ()

    @property
    def reached(self) -> bool:
        """Whether a gradient came back to any of the outputs."""
        return any(gradient is not None for gradient in self.gradients)


@dataclass(slots=True, eq=False)
class Tape:
    """The records of one microbatch's forward through one stage, and gradients that I found early."""

    records: list[OwnerCall] = field(default_factory=list)
    early: Gradients = field(default_factory=list)

    def backward_input(
        self,
        roots: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        leaves: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of `leaves`; those of the records are kept for `weight_gradients`."""
        records = list(self.records)
        places = [place for record in records for place in record.places]
        before, _of_thread.tape = running(), self
        try:
            tensors = gradients_at([*leaves, *places, *parameters], roots, gradients)
        finally:
            _of_thread.tape = before
        last = first = len(leaves)
        for record in records:
            start, last = last, last + len(record.places)
            record.gradients = tensors[start:last]
            record.places = ()  # the graph is no longer needed
        self.early += [
            (param, grad) for param, grad in zip(parameters, tensors[last:], strict=True) if grad is not None
        ]
        return tensors[:first]

    @torch.no_grad()
    def weight_gradients(self) -> Gradients:
        """Return the gradient of every parameter that the microbatch reached, and clear the records."""
        total: dict[nn.Parameter, Tensor] = {}
        # Last used, first added: the order in which autograd sums the uses of one parameter.
        reached = [record for record in reversed(self.records) if record.reached]
        _add(total, (pair for call in reached if not call.owner.by_autograd for pair in call.owner.gradients(call)))
        for parameter, gradient in total.items():
            # Under autocast, all uses share one cast of the parameter, so autograd adds them before casting back.
            total[parameter] = _hooked(parameter, gradient.to(parameter.dtype))
        _add(total, (pair for call in reached if call.owner.by_autograd for pair in call.owner.gradients(call)))
        # Autograd may give one tensor to several parameters and to the previous stage, so keep a copy here.
        _add(total, ((param, gradient if param in total else gradient.clone()) for param, gradient in self.early))
        self.records, self.early = [], []
        return list(total.items())


def _add(total: dict[nn.Parameter, Tensor], gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> None:
    for parameter, gradient in gradients:
        total[parameter] = gradient if parameter not in total else total[parameter] + gradient


def _hooked(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
    """Return a parameter's gradient after its own hooks, as autograd would."""
    for hook in (parameter._backward_hooks or {}).values():
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def merged(tapes: Sequence[Tape]) -> Gradients:
    """Return the summed weight gradients of several microbatches; those of a linear layer as one larger product."""
    first, *others = tapes
    alike = all([record.owner for record in tape.records] == [call.owner for call in first.records] for tape in others)
    if not others or not alike:
        return [pair for tape in tapes for pair in tape.weight_gradients()]
    whole = Tape()
    whole.early = [pair for tape in tapes for pair in tape.early]
    for calls in zip(*(tape.records for tape in tapes), strict=True):
        reached = [call for call in calls if call.reached]
        whole.records += reached[0].owner.joined(reached) if len(reached) > 1 else reached
    for tape in tapes:
        tape.records, tape.early = [], []
    return whole.weight_gradients()


@torch.no_grad()
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
        gradient = gradient.to(gradient_dtype(parameter))
        if gradient.layout is not torch.strided:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        elif parameter.grad is None:
            fits = gradient._base is None and gradient.stride() == parameter.stride()
            parameter.grad = gradient if fits else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
        else:
            sums.append(parameter.grad)
            added.append(gradient)
    if sums:
        torch._foreach_add_(sums, added)
    for parameter, _ in gradients:
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(parameter)
