"""What plain torch makes of a case of the mesh fuzzer, and how far a right result may be from it.

    float64        all rows at once                                                  within 1e-10
    float32, bf16  the same in float64, from the same values                         within what rounding was measured:
                   the model in its own dtype, all rows at once: how far it is off   4 times the larger of the two
                   the same, microbatch by microbatch: how far it is off

A result is nowhere asked to be nearer than the last digit of its dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mesh_cases import DTYPES, Case

_TIMES = 4.0  # what a mesh may be off, of what plain torch was seen to be off
Gradients = dict[str, Tensor]


@dataclass(frozen=True)
class Results:
    """What two steps came to, and an evaluation after them."""

    losses: list[float]
    gradients: list[Gradients]
    state: Gradients
    evaluated: float

    @property
    def norm(self) -> float:
        """That of all gradients of the last step."""
        return norm(self.gradients[-1])


@dataclass(frozen=True)
class Bounds:
    """How far each of these may be off."""

    losses: list[float]
    gradients: list[float]  # of a step, of each parameter
    state: float  # of each tensor
    norm: float
    evaluated: float


def norm(tensors: Gradients) -> float:
    """Return the norm of all of them together."""
    return float(torch.stack([tensor.double().norm() for tensor in tensors.values()]).norm())


def wanted(case: Case) -> tuple[Results, Bounds]:
    """Return what a case must come to, and how far from it is right."""
    if case.near is not None:
        exact = plain(case)
        return exact, _of_size(exact, case.near)
    exact = plain(case, exact=True)
    least = _of_size(exact, _digit(case))
    runs = [plain(case)]
    if case.own != "two":  # whose parts have different shares
        runs.append(plain(case, each=True))
    seen = [_off(exact, run) for run in runs]
    return exact, _largest([least, *seen], _TIMES)


def _digit(case: Case) -> float:
    low = torch.bfloat16 if "precision" in case.options else DTYPES[case.dtype]
    return float(torch.finfo(low).eps)


def _of_size(known: Results, near: float) -> Bounds:
    """Return bounds that are a part of the size of all."""
    sizes = [norm(gradient) for gradient in known.gradients]
    losses = [near * max(abs(loss), 1.0) for loss in known.losses]
    last = near * max(abs(known.evaluated), 1.0)
    return Bounds(losses, [near * size for size in sizes], near * norm(known.state), near * max(sizes[-1], 1.0), last)


def _off(exact: Results, other: Results) -> Bounds:
    """Return how far the second is off: of gradients and state, the tensor that is off farthest."""
    losses = [abs(loss - two) for loss, two in zip(exact.losses, other.losses, strict=True)]
    apart = [_apart(gradient, two) for gradient, two in zip(exact.gradients, other.gradients, strict=True)]
    state = max(_apart(exact.state, other.state).values())
    whole = sum(value * value for value in apart[-1].values()) ** 0.5
    gradients = [max(entry.values()) for entry in apart]
    return Bounds(losses, gradients, state, whole, abs(exact.evaluated - other.evaluated))


def _apart(ones: Gradients, others: Gradients) -> dict[str, float]:
    return {name: float((tensor.double() - others[name].double()).norm()) for name, tensor in ones.items()}


def _largest(bounds: list[Bounds], times: float) -> Bounds:
    def each(rows: list[list[float]]) -> list[float]:
        return [times * max(column) for column in zip(*rows, strict=True)]

    losses, gradients = each([bound.losses for bound in bounds]), each([bound.gradients for bound in bounds])
    state, whole, last = each([[bound.state, bound.norm, bound.evaluated] for bound in bounds])
    return Bounds(losses, gradients, state, whole, last)


def plain(case: Case, *, exact: bool = False, each: bool = False) -> Results:
    """Run the case with plain torch, in one process; `exact` in float64, `each` microbatch by microbatch."""
    made = case.model(plain=True, exact=exact)
    optimizer = torch.optim.SGD([param for param in made.parameters() if param.requires_grad], lr=case.rate)
    low = torch.autocast("cpu", torch.bfloat16, enabled="precision" in case.options and not exact)
    losses: list[float] = []
    gradients: list[Gradients] = []

    def run(step: int, *, backward: bool) -> float:
        total = 0.0
        for x, y, share in _parts(case, step, each=each or case.apart):
            with low:
                loss = _loss(case, made, x, y.double() if exact and y.is_floating_point() else y) * share
            if backward:
                torch.autograd.backward(loss)
            total += float(loss.detach())
        return total

    for step in range(2):
        losses.append(run(step, backward=True))
        found = {name: param.grad for name, param in made.named_parameters() if param.grad is not None}
        gradients.append({name: value.double().clone() for name, value in found.items()})
        if case.updates and not step:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        return Results(losses, gradients, dict(made.state_dict()), run(1, backward=False))


def _parts(case: Case, step: int, *, each: bool) -> list[tuple[Tensor, Tensor, float]]:
    """Return the microbatches of all lines with their shares of the loss, or all rows as one."""
    every = [pair for line in case.microbatches(step) for pair in line]
    if not each:
        x, y = (torch.cat(both) for both in zip(*every, strict=True))
        return [(x, y, 1.0)]
    count = case.function.count
    counts = [1.0 if count is None else count(y) for _, y in every]
    total = 1.0 if count is None else sum(counts)
    return [(x, y, number / total) for (x, y), number in zip(every, counts, strict=True) if number]


def _loss(case: Case, made: Any, x: Tensor, y: Tensor) -> Tensor:
    loss: Tensor = made(x, labels=y)["loss"] if case.own else case.function.function(made(x), y)
    return loss
