"""What follows between the steps of a pipeline: here, a flush, so that each step ends before the next one begins."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from drumline.engine.ground import Ground
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport
from drumline.engine.updates.validation_time import check as validated_after
from drumline.runtime.gradients.clip import all_finite
from drumline.runtime.step import Step


class Flow(Observer):
    """A flushed schedule: between two steps, nothing is in flight and no update is due; a subclass has no flush."""

    num_ahead = 0  # how many steps a rank may be ahead of another one
    num_in_flight = 0  # how many of the last steps other ranks may not have finished
    skipped: Mapping[int, str] = {}  # steps of which an update was left out, and the ranks with a NaN, by name

    def __init__(self, ground: Ground, *, check_finite: bool) -> None:
        self.ground, self.check_finite = ground, check_finite

    @property
    def told_until(self) -> int:
        """The last step of which every rank knows the outcome without a wait that costs anything."""
        ledger = self.ground.ledger
        if ledger.last is None or not self.ground.updates.validation.is_on:
            return ledger.number
        return ledger.last.number - 1  # with updates that run ahead, the last step has its turn after the next one

    def pause(self, what: str) -> None:
        """Before something else than a step, run what is in flight; all ranks call it alike."""

    def drain(self) -> None:
        """Run what is in flight, and make all updates that are due; all ranks call it alike."""

    def need_drained(self, what: str) -> None:
        """Refuse something that needs finished weights."""

    def clips(self, validated: str, max_norm: float | None) -> None:
        """Follow how an optimizer that is being made clips, and when its updates are validated."""
        self.ground.updates.validate(validated_after(validated, max_norm), max_norm)

    def judge(self, step: Step, report: RankReport, losses: list[Tensor]) -> None:
        """Note whether all of a training step's losses and gradients here are finite, and what no loss has reached."""
        ground = self.ground
        if self.check_finite:
            holdings = ground.holdings
            gradients = [param.grad for param in holdings.parameters() if param.grad is not None]
            finite = all_finite([*gradients, *losses])
            if ground.crew.alone:
                report.finite = finite
            else:
                report.finite = ground.lines.all_finite(bool(finite))
        if ground.ledger.unused.looks:
            named = ground.holdings.named_parameters()
            report.unreached = [name for name, param in named if param.requires_grad and param.grad is None]
