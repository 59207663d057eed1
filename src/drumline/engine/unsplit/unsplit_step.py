"""A step of the unsplit model, the reference of `verify` and of the check of steps.

    forward 0, backward 0, forward 1, backward 1      as plain training runs them; only a pipeline interleaves them

It runs the user's model and loss, and nothing of a pipeline but the seeds of its blocks. Gradients are added to the
parameters. Callers say what becomes of them, and of what the model keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drumline.engine.unsplit.plain import Plain
from drumline.model.loss.factors import Factors
from drumline.model.precision import Precision
from drumline.model.randomness import Randomness
from drumline.model.values import mapped


@dataclass(frozen=True, slots=True)
class UnsplitMicrobatch:
    """One microbatch of a step: its number, what goes in, what is wanted, and what part of the loss it is.

    `factors` are what the parts of a model's own loss are multiplied by. `seen_share` returns what part of the loss it
    is once the loss has run: some must be seen before it is known.
    """

    number: int
    inputs: Any
    target: Any
    share: float
    factors: Factors = ()
    seen_share: Callable[[], float] | None = None


@dataclass(frozen=True, slots=True)
class Made:
    """What the model made of a microbatch, on the host."""

    output: Any
    loss: Tensor
    share: float  # what part of the batch's loss it was taken for
    drew: bool = False  # whether the model drew random numbers of torch's
    loss_drew: bool = False  # whether the loss function drew some, which are others in every order of microbatches


def unsplit_step(
    model: Plain,
    each: Iterable[UnsplitMicrobatch],
    loss_fn: Callable[[Any, Any], Tensor | None],
    *,
    randomness: Randomness,
    precision: Precision,
    scale: float = 1.0,
    multiplying: Callable[[UnsplitMicrobatch], AbstractContextManager[object]] = lambda _: nullcontext(),
) -> Iterator[Made]:
    """Run microbatches one after another, and yield what the model made of each, once it has added its gradients.

    These are gradients of the loss times its share and `scale`. A microbatch that is no part of the loss has none: a
    mean over nothing is NaN.

    >>> layer, cpu = torch.nn.Linear(2, 1, bias=False), torch.device("cpu")
    >>> each = [UnsplitMicrobatch(0, torch.ones(3, 2), None, 0.5), UnsplitMicrobatch(1, torch.ones(3, 2), None, 0.0)]
    >>> outcomes = unsplit_step(
    ...     Plain([layer], ["0"]), each, lambda output, _: output.sum(),
    ...     randomness=Randomness(0, cpu), precision=Precision(),
    ... )
    >>> [value.share for value in outcomes], layer.weight.grad
    ([0.5, 0.0], tensor([[1.5000, 1.5000]]))
    """
    for microbatch in each:
        with model.seeding(microbatch.number, randomness) as run:
            with randomness.listening() as drawing, precision.autocast:
                with multiplying(microbatch):
                    output = run(microbatch.inputs)
                before = randomness.states()
                counts = microbatch.share or microbatch.seen_share is not None
                loss = loss_fn(output, microbatch.target) if counts else torch.zeros(())
                loss_drew = randomness.has_moved(before)
                assert loss is not None, "a step that trains has a loss"
                loss = precision.full(loss)
            share = microbatch.share if microbatch.seen_share is None else microbatch.seen_share()
            if loss.requires_grad:
                weight = torch.as_tensor(share * scale, dtype=loss.dtype, device=loss.device)
                torch.autograd.backward(loss, weight)
        on_host, outcomes = mapped(output, lambda tensor: tensor.detach().cpu()), loss.detach().cpu()
        del output, loss  # no graph stays while the caller looks at them
        yield Made(on_host, outcomes, share, bool(drawing), loss_drew)
