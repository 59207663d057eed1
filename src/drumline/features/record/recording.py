"""What happens to measurements: a timeline of the last step, or a run in a folder.

    step n ends      every rank tells the others its record
    step n+1         when a rank first waits, it writes its line of step n; rank 0 also writes the metrics of
                     steps that all ranks have told. If a rank never waits, it writes at the end.

No rank waits for any of this, and writing uses time in which a rank is idle. If a device has not finished a step by
the step's end, its record is told and written with the next step.
"""

from __future__ import annotations

import atexit
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drumline.core.errors import UsageError
from drumline.core.measured.align import Dial
from drumline.core.measured.record import BETWEEN, Record
from drumline.core.program import Program
from drumline.engine.program.programs import Programs
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.journal import Journal, StepGap
from drumline.engine.ranks.tally import RankReport, Tally, TallyLedger
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.stages.assembly import checkpointed
from drumline.features.record.continuation import set_aside
from drumline.features.record.run_folder import RunFolder, config_of, environment_of, plan_of, problem
from drumline.runtime.draft import END, LEAVE, Clock, Draft
from drumline.runtime.step import Step

T = TypeVar("T")
_ENDED: Any = object()
_SECONDS_TO_READ = 10.0  # how long one reading of several hosts' clocks is used


class Between(StepGap):
    """The time that this process's ranks spend between two steps, in pieces that do not overlap.

        step ──┤tell│write│      │ clip    │hear│ clip │ update │      │ data │├── step
        outside                               outside

    Times are kept by kind since the last step, for each rank by its own clock.

    >>> between = Between([Clock()])
    >>> with between.during("clip"), between.during("hear"):
    ...     pass
    >>> draft = Draft(0)
    >>> between.hand_over([draft])
    >>> [BETWEEN[kind] for kind in draft.between[::3]]
    ['clip', 'hear', 'clip']
    """

    def __init__(self, clocks: Sequence[Clock]) -> None:
        self._clocks = clocks
        self._open: list[int] = []  # open kinds, the innermost last
        self._from: list[int] = []  # by rank, the start of the innermost piece
        self._rows: list[list[int]] = [[] for _ in clocks]
        self._since = [clock.now() for clock in clocks]

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count the time inside as `kind`, except for inner pieces that have their own kind."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    def enter(self, kind: str) -> None:
        """Begin a piece."""
        self._cut()
        self._open.append(BETWEEN.index(kind))

    def leave(self) -> None:
        """End the innermost piece. Do nothing if a step has begun since, as it may inside an optimizer's step."""
        self._cut()
        if self._open:
            self._open.pop()

    def _cut(self) -> None:
        moments = [clock.now() for clock in self._clocks]
        if self._open:
            for rows, start, end in zip(self._rows, self._from, moments, strict=True):
                rows.extend((self._open[-1], start, end))
        self._from = moments

    def hand_over(self, drafts: Sequence[Draft]) -> None:
        """Give the next step's drafts all times up to now, and begin these drafts."""
        self._cut()
        self._open.clear()
        for at, (draft, clock) in enumerate(zip(drafts, self._clocks, strict=True)):
            draft.since_ns, draft.between = self._since[at], self._rows[at]
            draft.begin_ns = clock.now()
            self._rows[at] = []

    def begin_again(self, drafts: Sequence[Draft], fresh: Sequence[Draft]) -> None:
        """Begin a step once more, with fresh drafts; all since its first beginning counts as an update."""
        self._cut()
        self._open.clear()
        self._rows = [[] for _ in self._clocks]
        for old, draft, now in zip(drafts, fresh, self._from, strict=True):
            draft.since_ns, draft.clock, draft.program, draft.heard = old.since_ns, old.clock, old.program, old.heard
            draft.between = [*old.between, BETWEEN.index("update"), old.begin_ns, now]
            draft.begin_ns = now

    def ended(self, drafts: Sequence[Draft]) -> None:
        """Start again at the end of the step."""
        self._since = [draft.end_ns for draft in drafts]


class Recording(Journal):
    """The records of this process's ranks, in the folder of a run if one is given."""

    def __init__(
        self,
        folder: str | Path | None,
        crew: Crew,
        ledger: TallyLedger,
        gradients_left: Callable[[], bool],
        clocks: Sequence[Clock],
        *,
        continues: bool = False,
    ) -> None:
        super().__init__(ledger, gradients_left)
        self.folder: RunFolder | None = None
        self._crew = crew
        self._ranks = [channel.rank for channel in crew.channels]
        self._clocks = clocks
        self._has_clocks = False  # whether ranks on several hosts have several clocks
        self._dials: tuple[Dial, ...] = ()  # how to read the clocks, and until when
        self._read_until = 0.0
        self.between: Between = Between(clocks)
        self._late: Sequence[Draft] = ()  # of the last step, if the device had not finished it
        self._unwritten: list[Record] = []
        self._described = {0}  # numbers of the programs in the folder
        self._programs: Sequence[Program] | Programs = ()
        self._waiting: list[tuple[Tally, dict[str, Any]]] = []  # steps whose metrics are not written yet
        self._takes_notes = False  # whether the last step still accepts metrics: the next one has not begun
        self.notes_late = 0  # how many steps later than others metrics of a step may come
        if folder is not None:
            self.folder = self._continued(Path(folder)) if continues else self._opened(Path(folder))
            _open.add(self)
        numbers = crew.all_told("clocks", [clock.number for clock in clocks])
        self._has_clocks = len(set(numbers)) > 1
        if self._has_clocks:
            crew.compare_clocks()

    def _opened(self, path: Path) -> RunFolder:
        """Begin a run, on all ranks or on none."""
        own_answers = [(problem(path, [rank]), secrets.token_hex(6)) for rank in self._ranks]
        answers = self._crew.all_told("run", own_answers)
        for text, _ in answers:
            if text:
                raise UsageError(
                    text, expected="a new folder, or one without a run", fix="choose another folder for this run"
                )
        return RunFolder(path, answers[0][1], self._ranks)

    def _continued(self, path: Path) -> RunFolder:
        """Continue the run in a folder; rank 0 makes room before the others open their files."""
        own_answers = [set_aside(path) if rank == 0 else "" for rank in self._ranks]
        answers = self._crew.all_told("run", own_answers)
        return RunFolder(path, answers[0], self._ranks, continues=True)

    def rewind(self) -> None:
        """Forget the lines of steps from the next one on: they will run again."""
        if self.folder is not None and self.folder.is_open:
            self._write(self.folder, last=True)
            self.folder.rewind(self._ledger.num_trained)

    def flush(self) -> None:
        """Write all that is known, so that it outlives this process; the last step takes no more notes."""
        if self.folder is not None and self.folder.is_open:
            self._takes_notes = False
            self._write(self.folder, last=True)
            self.folder.flush()

    def describe(self, setting: PipelineSetup, cut: ModelCut, programs: Programs) -> None:
        """Write what is known before the first step; all ranks call it."""
        if self.folder is None:
            return
        self._crew.waiting.append(self.waiting)
        self._crew.failed.append(self.flush)
        self._programs = programs
        options, first = setting.options, programs[0]
        environments = self._crew.collect("environment", environment_of(setting.device))
        if 0 in self._ranks:
            plan = plan_of(first, cut.stages, checkpointed(options.checkpoint, cut.stages), cut.balance)
            environment = {"ranks": environments, "devices": self._crew.devices.to_json()}
            self.folder.describe(first, config_of(options.settings()), plan, environment)

    def at_call(self, step: Step) -> None:
        """Begin the drafts of a step; its program is written before its first line."""
        self._takes_notes = False
        if step.program not in self._described and 0 in self._ranks and self.folder is not None:
            self.folder.add_program(step.program, self._programs[step.program])
            self._described.add(step.program)
        step.drafts = [Draft(rank, step.draw) for rank in self._ranks]
        for draft, clock, channel in zip(step.drafts, self._clocks, self._crew.channels, strict=True):
            draft.clock, draft.program = clock.number, step.program
            if self._has_clocks:
                draft.heard = [moment for comparison in channel.comparisons() for moment in comparison]
        self.between.hand_over(step.drafts)

    def again(self, step: Step) -> None:
        """Begin other drafts."""
        fresh = [Draft(rank, step.draw) for rank in self._ranks]
        self.between.begin_again(step.drafts, fresh)
        step.drafts = fresh

    def evaluating(self, step: Step) -> None:
        """Begin drafts for a step that only evaluates, which has a timeline and no line of the run."""
        step.drafts = [Draft(rank, step.draw) for rank in self._ranks]
        for draft, clock in zip(step.drafts, self._clocks, strict=True):
            draft.clock = clock.number
            draft.since_ns = draft.begin_ns = clock.now()

    def end(self, step: Step) -> None:
        """Record that all rows of this process have ended and everything is sent."""
        self._spent(step, LEAVE)

    def tell(self, step: Step, each: Sequence[RankReport]) -> None:
        """Record that only telling is left, and add the settled records to it."""
        if step.train:
            self._spent(step, END)
            self.between.ended(step.drafts)
        self.between.enter("tell")
        if step.train:
            self._fill(step, each)
        else:
            for report, record in zip(each, self.settled(step.drafts), strict=True):
                report.record = record

    def after_telling(self, step: Step, tally: Tally, each: Sequence[RankReport]) -> None:
        """Store what the ranks of this process told about a step, to write it during the next one."""
        self.between.leave()
        if step.train:
            if self._crew.alone:
                tally.own_records = partial(self.settled, step.drafts)
            with self.between.during("write"):
                self._add(tally, each)

    def _spent(self, step: Step, kind: int) -> None:
        for draft, clock in zip(step.drafts, self._clocks, strict=True):
            now = clock.now()
            draft.spent(kind, draft.end_ns, now)
            draft.end_ns = now

    def data(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the items of a loader, and measure the time until each arrives."""
        batches = iter(loader)
        while True:
            with self.between.during("data"):
                batch = next(batches, _ENDED)
            if batch is _ENDED:
                return
            yield batch

    def settle(self) -> None:
        """Wait for the outcome of all steps so far on all ranks, and raise if one of them failed."""
        with self.between.during("hear"):
            super().settle()

    def _fill(self, step: Step, each: Sequence[RankReport]) -> None:
        """Add settled records to what the ranks tell: those of this step, or else of the last one."""
        if self._late:
            for report, record in zip(each, self.settled(self._late), strict=True):
                report.late = record
        self._late = step.drafts
        if all(clock.settle(draft, wait=False) for clock, draft in zip(self._clocks, step.drafts, strict=True)):
            self._late = ()
            for report, draft in zip(each, step.drafts, strict=True):
                report.record = draft.record()

    def settled(self, drafts: Sequence[Draft]) -> list[Record]:
        """Return the records of a step on this process's ranks; waits for the device."""
        for draft, clock in zip(drafts, self._clocks, strict=True):
            clock.settle(draft, wait=True)
        return [draft.record() for draft in drafts]

    def _add(self, tally: Tally, each: Sequence[RankReport]) -> None:
        if self.folder is None or not self.folder.is_open:
            return
        self.waiting()
        self._unwritten += [record for report in each for record in (report.late, report.record) if record is not None]
        if 0 in self._ranks:
            self._waiting.append((tally, {}))
            self._takes_notes = True

    def waiting(self) -> None:
        """Write the lines of earlier steps, and the metrics of steps that all ranks have told."""
        if self._unwritten and self.folder is not None and self.folder.is_open:
            self._write(self.folder)
            self.folder.flush_if_due()

    def _write(self, folder: RunFolder, *, last: bool = False) -> None:
        """Write what is known; the metrics of the last step only once it takes no more notes, or if nothing follows."""
        for record in self._unwritten:
            folder.add_record(record)
        self._unwritten = []
        num_kept = 0 if last else self._takes_notes + self.notes_late
        while len(self._waiting) > num_kept and self._waiting[0][0].is_complete:
            tally, noted = self._waiting.pop(0)
            if self._has_clocks and time.monotonic() > self._read_until:
                self._dials, self._read_until = self._ledger.dials(tally), time.monotonic() + _SECONDS_TO_READ
            folder.add_metrics(tally.trained, tally.metrics(noted, self._dials))

    def refuse_move(self, *, changes_program: bool) -> None:
        """Refuse moves that change the program of a run that is written to a folder."""
        if self.folder is not None and changes_program:
            raise UsageError(
                "repartition: stages would have other backwards, because of frozen parameters",
                expected="the same program in a recorded run",
                fix="keep a trainable block in each stage that has one now, or pass record=True",
            )

    def decided(self, step: int, line: Mapping[str, Any]) -> None:
        """Write what was decided before a step, or what came of it; rank 0 calls it."""
        if self.folder is not None and self.folder.is_open:
            self.folder.add_decision(step, line)

    def note(self, of_step: int | None = None, /, **metrics: Any) -> None:
        """Add metrics to the last step, or to the one of a number if it is not written yet."""
        for tally, noted in self._waiting[-1:] if of_step is None else self._waiting:
            if of_step in (None, tally.trained):
                noted.update(metrics)

    def close(self) -> None:
        """Write the rest, as far as it is known, and end the run."""
        if self.folder is not None and self.folder.is_open:
            if self._late:
                self._unwritten += self.settled(self._late)
                self._late = ()
            if self._crew.alone and not self._crew.over:
                for tally, _ in self._waiting:
                    tally.reports  # noqa: B018 - all ranks of one process have told, so that hearing waits for nobody
            self._write(self.folder, last=True)
            self.folder.close()

    def __del__(self) -> None:
        self.close()

    def check(self) -> None:
        """Raise nothing: steps are recorded."""


# Users who forget to close the pipeline, or just end the process, still get their run.
_open: weakref.WeakSet[Recording] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for recording in list(_open):
        recording.close()
