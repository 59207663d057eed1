"""The data of one step and its results, as all parts of a rank see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from drumline.runtime.draft import Draft


class CalledWith(NamedTuple):
    """The arguments of a step."""

    batch: tuple[Any, ...]
    named: dict[str, Any]
    target: Any


@dataclass(slots=True)
class Step:
    """The data of one step, by microbatch, and its results."""

    number: int
    batch: Any = None  # the source of inputs and targets
    target: Any = None
    inputs: Sequence[Any] = ()
    targets: Sequence[Any] = ()
    shares: Sequence[Tensor] = ()  # each microbatch's share of the batch's loss
    cuts: Callable[[Any], list[Any]] | None = None  # splits the batch into inputs
    wants_outputs: bool = False  # whether it keeps the last stage's output
    train: bool = True
    program: int = 0  # number of its program among those of the pipeline
    instead: Any = None  # the program to run by if the step names none, and the pipeline's own needs more rows
    is_split: bool = False  # whether the user split the batch, so that shapes of microbatches may differ
    sizes: Sequence[Any] = ()  # rows and length of each given microbatch, if known
    order: tuple[int, ...] = ()  # which of them runs in each slot of the program, if an order was chosen
    scale: float = 1.0  # loss scale: factor of the loss's gradient, so that float16 can hold it
    share: float = 1.0  # this step's share of an update, if several steps add up to it
    draw: int = 0  # number of training steps before it, which seeds random numbers
    drafts: Sequence[Draft] = ()  # measurements of each rank of this process
    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)

    @property
    def factor(self) -> float:
        """What all of the loss's gradient is multiplied by."""
        return self.scale * self.share
