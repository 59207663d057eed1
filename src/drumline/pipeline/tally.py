"""How a step went on every rank: told by each at its end, heard by whoever needs it.

A rank does not wait at the end of a step. The loss, the check for NaN and the timeline wait when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from drumline.core.errors import MismatchError, ModelError, NonFiniteError, RunError
from drumline.core.measured import Measured
from drumline.core.program import Program
from drumline.core.record import Record
from drumline.pipeline.scaler import LossScaler


@dataclass(slots=True)
class Told:
    """What one rank tells: its microbatches' parts of the loss, whether all was finite, and its record."""

    microbatches: list[int] = field(default_factory=list)
    losses: Sequence[float | Tensor] = ()
    dtype: str = "float32"
    finite: bool | Tensor = True
    scale: float | None = None  # of the loss, as this rank knows it
    unreached: list[str] = field(default_factory=list)
    record: Record | None = None
    num_rows: int = 0  # of the batch, where it is known
    num_tokens: int = 0


@dataclass
class Tally:
    """All ranks' words on one step; `hear` is called once, when they are first needed."""

    number: int
    hear: Callable[[], list[Told]]
    program: Program
    scaler: LossScaler | None = None
    own: Callable[[], list[Record]] | None = None  # where all ranks are here, their records once they are asked for

    @cached_property
    def told(self) -> list[Told]:
        """What every rank told."""
        return self.hear()

    @property
    def is_heard(self) -> bool:
        """Whether all ranks' words are here."""
        return "told" in self.__dict__

    @cached_property
    def records(self) -> Sequence[Record | None]:
        """What every rank recorded."""
        return [one.record for one in self.told] if self.own is None else self.own()

    @property
    def has_timeline(self) -> bool:
        """Whether the actions were timed on all ranks: not if they were captured, or nothing is recorded."""
        return all(record is not None and record.starts for record in self.records)

    @cached_property
    def loss(self) -> Tensor | None:
        """The batch's loss, its microbatches' parts added in their order; None where there was no target."""
        parts = {number: part for one in self.told for number, part in zip(one.microbatches, one.losses, strict=True)}
        if not parts:
            return None
        dtype = next(getattr(torch, one.dtype) for one in self.told if one.losses)
        first, *others = (torch.as_tensor(parts[number], dtype=dtype) for number in sorted(parts))
        for part in others:
            first = first + part
        return first

    @cached_property
    def timeline(self) -> Measured:
        """What the ranks measured."""
        if not self.has_timeline:
            raise RunError("a captured step has no timeline", fix="use capture=False to measure")
        return Measured(self.program, tuple(one for one in self.records if one is not None))

    def check(self) -> None:
        """Raise if the step must not be built on, on every rank alike."""
        missing = sorted({name for one in self.told for name in one.unreached})
        if missing:
            raise ModelError(
                f"no loss reaches {', '.join(missing[:4])}{' and others' if len(missing) > 4 else ''}",
                expected="a gradient for every trainable parameter",
                fix="freeze what the loss does not use: parameter.requires_grad_(False)",
            )
        bad = [str(rank) for rank, one in enumerate(self.told) if not one.finite]
        scales = sorted({one.scale for one in self.told if one.scale is not None})
        if len(scales) > 1:
            raise MismatchError(
                f"step {self.number}: ranks scaled the loss by {', '.join(f'{one:g}' for one in scales)}",
                expected="the same scale on every rank",
                fix="load the same state into pipe.scaler on all of them",
            )
        if bad and not (self.scaler is not None and self.scaler.handles(self.number, bad)):
            raise NonFiniteError(
                f"step {self.number}: a loss or gradient on rank {', '.join(bad)} is NaN or infinite",
                expected="finite numbers; no optimizer has stepped",
                fix="zero_grad() and skip the batch, lower the learning rate, or pass check_finite=False",
            )


class Ledger:
    """The tallies of all steps so far: those nobody has looked at, the last one, and one that was refused."""

    def __init__(self) -> None:
        self.last: Tally | None = None  # of the steps that trained
        self.reached = False  # whether it was looked at that every parameter gets a gradient
        self._open: list[Tally] = []
        self._refused: Tally | None = None

    def add(self, tally: Tally, *, trained: bool) -> None:
        """Enter a step that has been told of."""
        self._open.append(tally)
        if trained:
            self.last = tally
            self._refused = None  # gradients add up, so this step's check covers what was there before

    def settle(self, *, until: int | None, gradients_left: Callable[[], bool]) -> None:
        """Look at all steps, or those up to a number, and raise if one must not be built on."""
        if until is None and self._refused is not None and gradients_left():
            self._refused.check()
        while self._open and (until is None or self._open[0].number <= until):
            self._refused = self._open.pop(0)
            self._refused.check()
            self._refused = None
