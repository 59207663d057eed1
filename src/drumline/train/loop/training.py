"""The updates of a training run, one after the other, with all that happens between them.

::

    for every update   batches ──► pipeline steps, each with its share of the tokens ──► clip ──► update
    now and then       held-out loss, a sample text, progress, a checkpoint
    where asked to     stop after an update, with a checkpoint
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from drumline.channel.launch.stop import asked
from drumline.core.errors import BatchError, UsageError
from drumline.core.measured.measured import Measured
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.steps.result import StepResult
from drumline.train.config.settings import TrainSettings
from drumline.train.data.items.batch import Batch, Data
from drumline.train.loop.checkpoints import Checkpoints
from drumline.train.loop.curve import Curve
from drumline.train.loop.evaluate import Evaluation, Sample, bubble_of, evaluate, measured, over_lines, sample
from drumline.train.loop.log import Log
from drumline.train.loop.making import Calling
from drumline.train.loop.optimizers import Optimizers
from drumline.train.loop.peak_memory import PeakMemory
from drumline.train.loop.progress import Progress, Tell, Told, Update
from drumline.train.loop.rates import rate
from drumline.train.loop.stopping import EarlyStop, Skips


@dataclass(slots=True)
class TrainResult:
    """The outcome of a run, the same on every rank. `peak_bytes` is the most memory of every rank (peak_memory.py)."""

    folder: Path
    losses: list[float] = field(default_factory=list)  # of every update
    grad_norms: list[float] = field(default_factory=list)  # where gradients were clipped
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    first_step: int = 0  # steps of the run that this one continues
    num_tokens: int = 0  # that counted
    num_padded: int = 0  # all places that were computed
    num_skipped: int = 0  # updates left out for a NaN or infinity, in the run that this one continues too
    stopped: EarlyStop | None = None  # where somebody stopped it
    seconds: float = 0.0  # without building
    peak_bytes: tuple[int, ...] = ()
    merged: str = ""  # the folder of the model with the adapter merged into it
    devices: dict[str, Any] = field(default_factory=dict)  # where ranks computed, and what carried messages


class _TrainUpdate(NamedTuple):
    """An update: its steps with their shares, the norm of its gradients if it is known, and what to tell of it."""

    step: int
    results: list[tuple[float, StepResult]]
    norm: Tensor | None
    update: Update | None


class Training:
    """One run on this process's ranks."""

    def __init__(
        self,
        settings: TrainSettings,
        pipe: Pipeline,
        call: Calling,
        data: Data,
        trained: TrainResult,
        memory: PeakMemory,
        *,
        continues: bool = False,
    ) -> None:
        self.settings, self.pipe, self.call, self.data = settings, pipe, call, data
        self.trained, self.memory, self.continues = trained, memory, continues
        self.optimizers = Optimizers(pipe, settings.optimizer)
        how: dict[str, Any] = {"adapter": call.adapter, "continues": continues}
        self.checkpoints = Checkpoints(pipe, settings, data, trained.folder, **how)
        self.skips = Skips(pipe, settings.failures.max_skipped)
        self.batches: Iterator[Batch] = iter(pipe.data(data.training))
        self.curve = Curve()
        self._log: Log | None = None
        self._listeners: list[Tell] = []
        self._largest: Measured | None = None  # the largest step so far, while its update is under way
        self._bucket = 0  # of the last step
        self._untold_updates: deque[_TrainUpdate] = (
            deque()
        )  # updates that were not told of: their outcome is not known yet
        self._since = (0.0, 0)  # when tokens were last counted, and how many there were

    def run(self, tell: Tell | None) -> TrainResult:
        """Train to the end."""
        with ExitStack() as open_ones:
            if self.pipe.rank == self.pipe.axes.number == 0:
                self._log = open_ones.enter_context(closing(Log(self.pipe, self.settings, self.trained.folder)))
                self._log.buckets(self.data.buckets)
                if tell is None:
                    tell = progress = open_ones.enter_context(closing(Progress(self.settings.run.steps)))
                    progress.begin(str(self.pipe.devices))
                self._listeners.append(tell)
            first = self._resumed()
            if self._log is not None and self.continues:
                self._log.continued(first)
            self._train(first)
            self.trained.peak_bytes = self._peaks()
            self.pipe.close()  # before the log, which forwards all that was written
        return self.trained

    def _train(self, first: int) -> None:
        """Make all updates from the first on, or those until somebody stops the run."""
        began, step = time.perf_counter(), first
        self._since = began, self.trained.num_tokens
        cause = next(filter(None, self.pipe.gather(asked())), "")  # later ones are told with a step
        while step < self.settings.run.steps and not cause:
            self._update(step, (began, first))
            step += 1
            self._catch_up(max(1, self.pipe.steps_in_flight))
            if self._pauses(step):
                self._settle()
            self._look(step)
            self.checkpoints.after(step, self._counts())
            cause = self.pipe.stopping()
        self._settle()
        if cause and step < self.settings.run.steps:
            saved = self.checkpoints.now(step, self._counts()) if step > first else None
            self.trained.stopped = EarlyStop(step, cause, "" if saved is None else str(saved))
            self._tell(self.trained.stopped)
        self._catch_up()
        if not self.trained.stopped:
            self.pipe.drain()
        self.curve.read()
        self.trained.losses, self.trained.grad_norms = list(self.curve.losses), list(self.curve.norms)
        self.trained.seconds = time.perf_counter() - began

    def _counts(self) -> dict[str, int]:
        trained, skips = self.trained, self.skips
        own_counts = {"num_skipped": skips.num_skipped, "in_a_row": skips.in_a_row}
        return {"num_tokens": trained.num_tokens, "num_padded": trained.num_padded, **own_counts}

    def _resumed(self) -> int:
        """Return how many steps a run had made from which this one continues."""
        resume = self.checkpoints.resume()
        self.trained.num_tokens, self.trained.num_padded = resume.get("num_tokens", 0), resume.get("num_padded", 0)
        self.skips.num_skipped, self.skips.in_a_row = resume.get("num_skipped", 0), resume.get("in_a_row", 0)
        self.trained.num_skipped = self.skips.num_skipped
        steps: int = resume["step"]
        if steps >= self.settings.run.steps and not self.continues:
            raise UsageError(
                f"checkpoint.resume: {self.settings.checkpoint.resume} has made {steps} steps already",
                expected=f"fewer than run.steps, {self.settings.run.steps}",
                fix=f"train longer: --steps {2 * steps}",
            )
        self.trained.first_step = steps
        return steps

    def _peaks(self) -> tuple[int, ...]:
        answers = self.pipe.gather(self.memory.by_rank(self.pipe.rank))
        pairs = [pair for peak in answers for pair in peak.items()]
        return tuple(max(size for at, size in pairs if at == rank) for rank in sorted({rank for rank, _ in pairs}))

    # ---- one update --------------------------------------------------------------------------------------------------

    def _update(self, step: int, began: tuple[float, int]) -> None:
        """Run the pipeline steps of one update, and update."""
        settings = self.settings
        share = rate(settings.learning_rate, step, settings.run.steps)
        batches = [self._next(step) for _ in range(settings.batch.accumulate)]
        counts = over_lines(self.pipe, [[batch.num_tokens, batch.num_padded] for batch in batches])
        if self._streams:
            self.optimizers.set_rate(share)
        results = self._steps(step, batches, [tokens for tokens, _ in counts])
        norm = None if self._streams else self._optimized(share)
        trained = self.trained
        trained.num_tokens += sum(tokens for tokens, _ in counts)
        trained.num_padded += sum(padded for tokens, padded in counts if tokens)
        is_told = (step + 1) % settings.run.log_every == 0 or step + 1 == settings.run.steps
        update = self._update_of(step + 1, share, began) if is_told and self._log is not None else None
        self._untold_updates.append(_TrainUpdate(step + 1, results, norm, update))
        if not self._streams and not self.optimizers.run_ahead:
            self._catch_up()

    def _settle(self) -> None:
        """Wait for the verdict on updates that ran ahead of it, or that are not made yet."""
        if (self.optimizers.run_ahead or self._streams) and self._untold_updates:
            self.pipe.settle()
            self._catch_up()

    def _pauses(self, step: int) -> bool:
        """Whether something other than a step follows, so that nothing is gained by running ahead."""
        how, is_last = self.settings.evaluation, step == self.settings.run.steps
        looks = any(_is_due(every, step, is_last) for every in (how.every, how.sample_every))
        return looks or self.checkpoints.is_due(step)

    def _finish(self, update: _TrainUpdate) -> None:
        """Add an update's loss to the curve, and tell of it."""
        norm = self.skips.judged() if self.optimizers.run_ahead else update.norm
        if self._streams:
            self.skips.note(next(filter(None, (result.skipped for _, result in update.results)), ""))
        losses = [(part, result.loss) for part, result in update.results]
        self.curve.add([(part, loss) for part, loss in losses if loss is not None], norm)
        skipped = self.skips.ended(update.step)
        self.trained.num_skipped = self.skips.num_skipped
        if update.update is not None:
            self._tell_of(update.update, update.results[-1][1].step)
        if skipped is not None:
            self._tell(skipped)
            self.skips.refuse(skipped, self.checkpoints.newest)

    @property
    def _streams(self) -> bool:
        """Whether the schedule has no flush: then updates are made inside of steps."""
        return self.pipe.steps_in_flight > 0

    def _optimized(self, share: float) -> Tensor | None:
        """Clip and update, unless the gradients do not allow it; returns the norm before, if it is known by now."""
        norm = None if self.optimizers.run_ahead else self.skips.clipped(self.settings.optimizer.clip_norm)
        self.optimizers.set_rate(share)
        if self.skips.allows:
            self.optimizers.step()
        if self._largest is not None and self.skips.allows:
            several = self.settings.batch.accumulate > 1
            self.memory.weigh(self.pipe, self.optimizers.each, self._largest, accumulates=several)
            self._largest = None
        self.optimizers.zero_grad()
        return norm

    def _catch_up(self, in_flight: int = 0) -> None:
        """Read and tell of updates, but for the last ones, which other ranks may not have finished."""
        while len(self._untold_updates) > in_flight:
            self._finish(self._untold_updates.popleft())

    def _next(self, step: int) -> Batch:
        batch = next(self.batches, None)
        if batch is None:
            raise BatchError(
                f"the data ended in step {step + 1} of {self.settings.run.steps}",
                expected="a stream without end: epochs follow each other",
            )
        return batch

    def _steps(self, step: int, batches: list[Batch], counts: list[int]) -> list[tuple[float, StepResult]]:
        """Run the batches of one update, and return the outcome of each with its share of the tokens."""
        total = sum(counts)
        if not total:
            raise BatchError(
                f"no token of step {step + 1} counts",
                expected="at least one target that is not ignored in every update",
                fix="use larger batches, or leave out data without targets",
            )
        steps: list[tuple[float, StepResult]] = []
        for batch, tokens in ((item, count) for item, count in zip(batches, counts, strict=True) if count):
            args, kwargs = self.call(batch)
            self._bucket = batch.bucket if self.data.buckets else 0
            part = tokens / total
            if self._streams:
                steps.append((part, self.pipe.step(*args, **kwargs)))
                continue
            weighs = self.memory.wants(self.pipe, batch)
            result = self.skips.run(partial(self.pipe.step, *args, share=part, **kwargs))
            self._catch_up()  # with the update before, whose verdict the first step brings
            if weighs:
                self._largest = measured(self.pipe)
            steps.append((part, result))
        return steps

    # ---- what is told ------------------------------------------------------------------------------------------------

    def _update_of(self, step: int, share: float, began: tuple[float, int]) -> Update:
        """Return what to tell of an update, without its loss."""
        trained, now = self.trained, time.perf_counter()
        since, counted = self._since
        self._since = now, trained.num_tokens
        return Update(
            step=step,
            num_steps=self.settings.run.steps,
            loss=math.nan,
            lr=self.settings.optimizer.lr * share,
            grad_norm=None,
            num_tokens=trained.num_tokens,
            tokens_per_second=(trained.num_tokens - counted) / max(now - since, 1e-9),
            padding=1.0 - trained.num_tokens / max(trained.num_padded, 1),
            bubble=None,
            num_skipped=trained.num_skipped,
            peak_bytes=self.memory.num_bytes,
            resident_bytes=self.memory.resident_bytes,
            bucket=self._bucket,
            seconds_left=(now - began[0]) / (step - began[1]) * (self.settings.run.steps - step),
        )

    def _tell_of(self, update: Update, of_step: int) -> None:
        """Log an update as it is, and read it for those who show it now; `of_step` is its last pipeline step."""
        assert self._log is not None
        update = replace(update, loss=self.curve.latest, num_skipped=self.trained.num_skipped)
        self._log(update, of_step)
        shown = [fn for fn in self._listeners if not isinstance(fn, Progress) or fn.is_due(update.step)]
        if shown:
            self.curve.read()
            norm = self.curve.norms[-1] if self.curve.norms else None
            update = replace(update, loss=self.curve.losses[-1], grad_norm=norm, bubble=bubble_of(measured(self.pipe)))
        for function in shown:
            function(update)

    def _tell(self, news: Told) -> None:
        for function in (self._log, *self._listeners):
            if function is not None:
                function(news)

    def _look(self, step: int) -> None:
        """Evaluate and sample where the settings say so, on every rank, unless the run is to stop."""
        how, is_last, began = self.settings.evaluation, step == self.settings.run.steps, time.perf_counter()
        if _is_due(how.every, step, is_last) or _is_due(how.sample_every, step, is_last):
            self._catch_up()
        if self.data.validation and _is_due(how.every, step, is_last):
            evaluation = evaluate(self.pipe, self.call, self.data.validation, step)
            if evaluation is not None:
                self.trained.evaluations.append(evaluation)
                self._tell(evaluation)
        if _is_due(how.sample_every, step, is_last):
            run, length = self.settings.run, self.settings.batch.sequence
            text = sample(self.pipe, self.call, how, step=step, seed=run.seed, sequence=length)
            if text is not None:
                self.trained.samples.append(text)
                self._tell(text)
        self._since = self._since[0] + time.perf_counter() - began, self._since[1]


def _is_due(every: int, step: int, is_last: bool) -> bool:
    return every > 0 and (step % every == 0 or is_last)
