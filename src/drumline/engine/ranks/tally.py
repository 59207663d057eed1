"""The outcome of a step on every rank: each rank tells it at the end, and others read it when they need it.

A rank does not wait at the end of a step. The loss, the NaN check and the timeline wait when they are requested.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from drumline.channel.rank_names import BY_NUMBER, RankNames
from drumline.core.errors import MismatchError, NonFiniteError, RunError, UsageError
from drumline.core.measured.align import Dial, align
from drumline.core.measured.measured import Measured
from drumline.core.measured.metrics import load_metrics, step_metrics
from drumline.core.measured.record import Record
from drumline.core.program import Program
from drumline.engine.ranks.agreement import (
    ArgumentPrint,
    agree_on_batch,
    agree_on_followed,
    agree_on_mode,
    agree_on_order,
    agree_on_program,
)
from drumline.engine.ranks.unused import UnusedParameters

_MANY = 8
_NUM_RECENT = 16


class Handler(Protocol):
    """Decides what happens after a loss or gradient that is NaN or infinite."""

    def handles(self, number: int, ranks: str) -> bool:
        """Take note of the ranks that had one in a step, by name; return whether nobody else needs to."""


@dataclass(slots=True)
class RankReport:
    """What one rank tells: its microbatches' parts of the loss, whether all was finite, and its record."""

    microbatches: list[int] = field(default_factory=list)
    losses: Sequence[float | Tensor] = ()
    dtype: str = "float32"
    finite: bool | Tensor = True
    scale: float | None = None  # the loss scale on this rank
    share: float | None = None  # this step's share of an update, as given to this rank
    unreached: list[str] | None = None  # parameters without gradient, if this rank checked
    record: Record | None = None
    late: Record | None = None  # of the previous step, if the device finished it late
    num_rows: int = 0  # rows of the batch, if known
    num_tokens: int = 0
    loads: list[list[int]] = field(default_factory=list)  # of each mixture of experts: see load_metrics
    train: bool = True
    arguments: ArgumentPrint | None = None  # arguments of the step; None if all ranks are in one process
    followed: dict[str, str] = field(default_factory=dict)  # digests of graphs traced for new kinds of input
    order: tuple[int, ...] = ()  # order of the microbatches, if one was chosen
    program: tuple[str, str] = ("", "")  # digest and name of a program other than the pipeline's own
    stop: str = ""  # why this rank was asked to stop, if it was


@dataclass(eq=False)
class Tally:
    """What all ranks told about one step; `hear` is called once, when it is first needed."""

    number: int  # among steps and evaluations
    hear: Callable[[], list[RankReport]]
    program: Program
    handler: Handler | None = None
    naming: RankNames = BY_NUMBER
    program_number: int = 0
    trained: int = 0  # training steps before it: its number in the run, in which evaluations are no steps
    own_records: Callable[[], list[Record]] | None = None  # if all ranks are here, their records on demand
    following: Tally | None = None  # the next training step

    @cached_property
    def reports(self) -> list[RankReport]:
        """What every rank told."""
        return self.hear()

    @property
    def is_heard(self) -> bool:
        """Whether all ranks have told."""
        return "reports" in self.__dict__

    @property
    def is_complete(self) -> bool:
        """Whether everything about the step is known."""
        return self.is_heard and self.known_records is not None

    @property
    def records(self) -> tuple[Record, ...] | None:
        """The records of all ranks, waiting for those of this process; None until all others have told theirs."""
        known = self.known_records
        return tuple(self.own_records()) if known is None and self.own_records is not None else known

    @property
    def known_records(self) -> tuple[Record, ...] | None:
        """The same, without waiting for a device."""
        records = [report.record for report in self.reports]
        if None in records and self.following is not None and self.following.is_heard:
            records = [record or other.late for record, other in zip(records, self.following.reports, strict=True)]
        known = tuple(record for record in records if record is not None)
        return known if len(known) == len(records) else None

    @cached_property
    def loss(self) -> Tensor | None:
        """The loss of the batch, summed over microbatches in order; None without a target."""
        parts = {number: part for r in self.reports for number, part in zip(r.microbatches, r.losses, strict=True)}
        if not parts:
            return None
        dtype = next(getattr(torch, report.dtype) for report in self.reports if report.losses)
        first, *others = (torch.as_tensor(parts[number], dtype=dtype) for number in sorted(parts))
        for part in others:
            first = first + part
        return first

    @cached_property
    def timeline(self) -> Measured:
        """The timeline that the ranks measured."""
        records = self.records
        if records is None:
            raise RunError("a device has not finished the step yet", fix="run another step, or use check_finite=True")
        if not all(record.starts for record in records):
            raise RunError("a captured step has no timeline", fix="use capture=False to measure steps")
        return Measured(self.program, records)

    @property
    def stop(self) -> str:
        """Why the first rank that was asked to stop was asked, by name; empty if none was."""
        return next((f"{word.stop} on {self.naming.rank(at)}" for at, word in enumerate(self.reports) if word.stop), "")

    @property
    def unreached(self) -> set[str] | None:
        """The parameters that got no gradient on any rank; None if no rank checked."""
        if any(report.unreached is None for report in self.reports[:1]):
            return None
        return {name for report in self.reports for name in report.unreached or ()}

    def metrics(self, noted: Mapping[str, Any], dials: tuple[Dial, ...] = ()) -> dict[str, Any]:
        """Return the step's metrics; `noted` are additional ones, `dials` say how to read the ranks' clocks."""
        metrics: dict[str, Any] = {"loss_metrics/global_avg_loss": self.loss, **noted}
        if self.program_number:
            metrics["program"] = self.program_number
        metrics |= load_metrics([load for report in self.reports for load in report.loads])
        records = self.known_records
        if records is not None:
            metrics |= step_metrics(self.program, records, dials)
            seconds = metrics["time_metrics/end_to_end(s)"]
            rows, tokens = (
                max(getattr(report, what) for report in self.reports) for what in ("num_rows", "num_tokens")
            )
            if rows:
                metrics["throughput(rows/s)"] = rows / seconds
            if tokens:
                metrics["throughput(tps)"] = tokens / seconds / len(records)  # per device, as in torchtitan
        return {name: _plain(value) for name, value in metrics.items()}

    def check(self) -> None:
        """Raise the same error on every rank if the step failed."""
        agree_on_mode([report.train for report in self.reports], self.number, self.naming)
        agree_on_program([report.program for report in self.reports], self.number, self.naming)
        agree_on_order([report.order for report in self.reports], self.number, self.naming)
        agree_on_batch([report.arguments for report in self.reports], self.number, self.naming)
        agree_on_followed([report.followed for report in self.reports], self.number, self.naming)
        bad = [at for at, report in enumerate(self.reports) if not report.finite]
        scales = sorted({report.scale for report in self.reports if report.scale is not None})
        if len(scales) > 1:
            raise MismatchError(
                f"step {self.number}: ranks scaled the loss by {', '.join(f'{scale:g}' for scale in scales)}",
                expected="the same scale on every rank",
                fix="load the same state into pipe.scaler on every rank",
            )
        shares = sorted({report.share for report in self.reports if report.share is not None})
        if len(shares) > 1:
            raise MismatchError(
                f"step {self.number}: ranks were given share={', '.join(f'{value:g}' for value in shares)}",
                expected="the same share on every rank",
                fix="count the tokens of the whole batch on every rank",
            )
        if bad and not (self.handler is not None and self.handler.handles(self.number, self.naming.listed(bad))):
            raise NonFiniteError(
                f"step {self.number}: a loss or gradient on {self.naming.listed(bad)} is NaN or infinite",
                expected="finite numbers; no optimizer has stepped",
                fix="call zero_grad() and skip the batch, lower the learning rate, or pass check_finite=False",
            )


class TallyLedger:
    """The tallies of all steps so far: those not yet checked, the last one, and one that failed."""

    def __init__(self, unused: str = "warn", never_used: Collection[str] | None = None) -> None:
        self.unused = UnusedParameters(unused, never_used)
        self.number = 0  # number of the next step or evaluation
        self.num_trained = 0  # number of training steps so far
        self.last: Tally | None = None  # the last training step
        self.before: Tally | None = None  # the training step before it
        self.evaluated: Tally | None = None  # the last step that evaluated
        self._recent: deque[Tally] = deque(maxlen=_NUM_RECENT)  # for estimating clock drift
        self._open: list[Tally] = []
        self._refused: Tally | None = None
        self._stop: tuple[int, str] | None = None  # the first checked step with which a rank told that it was asked to
        self.awaits: Callable[[], None] | None = None  # what else to wait for when all steps are checked
        self._followed: list[int] = []  # checked steps in which a rank traced the model, for another kind or again
        self._num_followed = 0

    def add(self, tally: Tally, *, trained: bool, alone: bool) -> None:
        """Add a finished step; ranks that are `alone` in one process share a clock."""
        self.number = tally.number + 1
        self._open.append(tally)
        if not trained:
            self.evaluated = tally
        else:
            self.num_trained += 1
            if self.last is not None:
                self.last.following = tally
            self.before, self.last = self.last, tally
            if not alone:
                self._recent.append(tally)
            self._refused = None  # gradients accumulate, so this step's check covers earlier ones

    def timeline(self, what: str = "train") -> Measured:
        """Return the last step that all ranks know; this may be the previous one, to avoid waiting for a device."""
        if what not in ("train", "evaluate"):
            raise UsageError(f"timeline of {what!r}", expected='"train" or "evaluate": the last step of that kind')
        if what == "evaluate":
            if self.evaluated is None:
                raise RunError("no evaluation has run yet", fix="call eval_step first")
            return self.evaluated.timeline
        if self.last is None:
            raise RunError("no step has run yet", fix="call pipe.step first")
        known = self.last if self.last.records is not None or self.before is None else self.before
        dials = self.dials(known)
        return replace(known.timeline, dials=dials) if dials else known.timeline

    def dials(self, tally: Tally) -> tuple[Dial, ...]:
        """Return how to read the ranks' clocks in a step."""
        records = tally.known_records
        if records is None or len({record.clock for record in records}) == 1:
            return ()
        known = [(step_tally, step_tally.known_records) for step_tally in self._recent if step_tally.is_heard]
        steps = [(step_tally, each) for step_tally, each in known if each is not None]
        return align([each for _, each in steps], [step_tally for step_tally, _ in steps].index(tally))

    def stop(self, until: int) -> str:
        """Why some rank was asked to stop by the end of a step, the same on all ranks; empty if none was."""
        known = [] if self._stop is None else [self._stop]
        pairs = ((tally.number, tally.stop) for tally in self._open if tally.number <= until)
        return next((why for number, why in (*known, *pairs) if why and number <= until), "")

    def has_followed(self, until: int) -> bool:
        """Whether the model was traced in a step up to a number, the same on all ranks; each is told once.

        Of more than eight such steps, only every one that doubles their number is told.
        """
        now = [number for number in self._followed if number <= until]
        self._followed = [number for number in self._followed if number > until]
        numbers = range(self._num_followed + 1, self._num_followed + 1 + len(now))
        self._num_followed += len(now)
        return any(number <= _MANY or not number & (number - 1) for number in numbers)

    def settle(self, *, until: int | None, gradients_left: Callable[[], bool]) -> None:
        """Check all steps, or those up to a number, and raise if one failed."""
        if until is None and self._refused is not None and gradients_left():
            self._refused.check()
        while self._open and (until is None or self._open[0].number <= until):
            if self._stop is None and (why := self._open[0].stop):
                self._stop = self._open[0].number, why
            self._refused = self._open.pop(0)
            if any(report.train and report.followed for report in self._refused.reports):
                self._followed.append(self._refused.number)
            self._refused.check()
            self.unused.hear(self._refused.unreached)
            self._refused = None
        if until is None and self.awaits is not None:
            self.awaits()


def _plain(value: Any) -> Any:
    """Return a number as JSON allows it, without tensors and non-finite values."""
    number = value.item() if isinstance(value, Tensor) else value
    return None if isinstance(number, float) and not math.isfinite(number) else number
