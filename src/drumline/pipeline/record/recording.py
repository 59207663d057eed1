"""What becomes of what is measured: nothing, the last step's timeline, or a run in a folder.

    step n ends      every rank tells its record
    step n+1         where a rank waits for the first time, its line of step n is written, and by rank 0 the metrics of
                     steps that all ranks have told of; where nobody waits, at the end

Nobody waits for any of this, and writing takes time that a rank has. What a device has not passed by the end of its
step is told and written with the next one.
"""

from __future__ import annotations

import atexit
import secrets
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from drumline.core.errors import RunError, UsageError
from drumline.core.measured.align import Dial
from drumline.core.measured.record import BETWEEN, Record
from drumline.core.program import Program
from drumline.pipeline.assembly import Assembly
from drumline.pipeline.balance import Balance
from drumline.pipeline.crew import Crew
from drumline.pipeline.lengths.programs import Programs
from drumline.pipeline.observer import Observer
from drumline.pipeline.record.run_folder import RunFolder, config_of, environment_of, plan_of, problem
from drumline.pipeline.record.tally import Ledger, Tally, Told
from drumline.pipeline.state.tensors import Holdings
from drumline.runtime.draft import END, LEAVE, Clock, Draft
from drumline.runtime.executor import Step

T = TypeVar("T")
_ENDED: Any = object()
_SECONDS_TO_READ = 10.0  # how long the clocks of several hosts are read in one way


class Between:
    """What happens on this process's ranks between two steps, in pieces that do not overlap.

        step ──┤tell│write│      │ clip    │hear│ clip │ update │      │ data │├── step
        outside                               outside

    Times are kept by kind since the last step, on each rank by its own clock.

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
        self._open: list[int] = []  # kinds, the innermost last
        self._from: list[int] = []  # by rank, since when the innermost goes on
        self._rows: list[list[int]] = [[] for _ in clocks]
        self._since = [clock.now() for clock in clocks]

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count what runs inside as `kind`, but for what inside of it has a kind of its own."""
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
        """End the innermost piece; nothing if a step has begun since, as one may inside of an optimizer's step."""
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
        """Let the next step's drafts have what is known, up to now; begins them."""
        self._cut()
        self._open.clear()
        for at, (draft, clock) in enumerate(zip(drafts, self._clocks, strict=True)):
            draft.since_ns, draft.between = self._since[at], self._rows[at]
            draft.begin_ns = clock.now()
            self._rows[at] = []

    def ended(self, drafts: Sequence[Draft]) -> None:
        """Begin anew where the step ended."""
        self._since = [draft.end_ns for draft in drafts]


class Recording(Observer):
    """The records of this process's ranks; `record` is what the user asked for: True, False, or a folder."""

    def __init__(
        self, record: bool | str | Path, crew: Crew, ledger: Ledger, holdings: Holdings, clocks: Sequence[Clock]
    ) -> None:
        self._ledger, self._holdings = ledger, holdings
        self.is_on = record is not False
        self.folder: RunFolder | None = None
        self._crew = crew
        self._ranks = [channel.rank for channel in crew.channels]
        self._clocks = clocks
        self._has_clocks = False  # more than one: ranks on several hosts
        self._dials: tuple[Dial, ...] = ()  # how they are read, and until when
        self._read_until = 0.0
        self.between = Between(clocks)  # what this process does between steps
        self._late: Sequence[Draft] = ()  # of the last step, where the device had not passed it
        self._unwritten: list[Record] = []
        self._described = {0}  # the numbers of the programs that are in the folder
        self._programs: Sequence[Program] | Programs = ()
        self._waiting: list[tuple[Tally, dict[str, Any]]] = []  # steps whose metrics are not written
        if not isinstance(record, bool):
            self.folder = self._opened(Path(record))
            _open.add(self)
        if self.is_on:
            numbers = crew.all_told("clocks", [clock.number for clock in clocks])
            self._has_clocks = len(set(numbers)) > 1
        if self._has_clocks:
            crew.compare_clocks()

    def _opened(self, path: Path) -> RunFolder:
        """Begin a run, on all ranks or on none."""
        own = [(problem(path, [rank]), secrets.token_hex(6)) for rank in self._ranks]
        told = self._crew.all_told("run", own)
        for text, _ in told:
            if text:
                raise UsageError(
                    text, expected="a folder without a run, or none yet", fix="name another folder for this run"
                )
        return RunFolder(path, told[0][1], self._ranks)

    def describe(
        self, settings: Mapping[str, Any], program: Program, assembly: Assembly, balance: Balance | None
    ) -> None:
        """Write what is known before the first step; all ranks call it."""
        told = self._crew.collect("environment", environment_of(assembly.device))
        if 0 in self._ranks and self.folder is not None:
            plan = plan_of(program, assembly, balance)
            self.folder.describe(program, config_of(settings), plan, {"ranks": told})

    def runs_several(self, programs: Programs) -> None:
        """Take note of the programs by which steps may run."""
        self._programs = programs

    def called(self, step: Step) -> None:
        """Begin drafts for a step, whose program is written before its first line."""
        if step.program not in self._described and 0 in self._ranks and self.folder is not None:
            self.folder.add_program(step.program, self._programs[step.program])
            self._described.add(step.program)
        step.drafts = [Draft(rank, step.number) for rank in self._ranks]
        for draft, clock, channel in zip(step.drafts, self._clocks, self._crew.channels, strict=True):
            draft.clock, draft.program = clock.number, step.program
            if self._has_clocks:
                draft.heard = [moment for one in channel.comparisons() for moment in one]
        self.between.hand_over(step.drafts)

    def end(self, step: Step) -> None:
        """Note that all rows of this process have ended and what was sent has left."""
        self._spent(step, LEAVE)

    def tell(self, step: Step, each: Sequence[Told]) -> None:
        """Note that only the telling is left, and put into it the records that are settled."""
        if step.train:
            self._spent(step, END)
            self.between.ended(step.drafts)
        self.between.enter("tell")
        if step.train and self.is_on:
            self._fill(step, each)

    def told(self, step: Step, tally: Tally, each: Sequence[Told]) -> None:
        """Take in what the ranks of this process told of a step, to be written during the next one."""
        self.between.leave()
        if step.train:
            if self._crew.alone and self.is_on:
                tally.own = partial(self.settled, step.drafts)
            with self.between.during("write"):
                self._add(tally, each)

    def _spent(self, step: Step, kind: int) -> None:
        for draft, clock in zip(step.drafts, self._clocks, strict=True):
            now = clock.now()
            draft.spent(kind, draft.end_ns, now)
            draft.end_ns = now

    def data(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what a loader does, and count the time that each batch takes to come."""
        batches = iter(loader)
        while True:
            with self.between.during("data"):
                batch = next(batches, _ENDED)
            if batch is _ENDED:
                return
            yield batch

    def settle(self) -> None:
        """Hear how the steps so far went on all ranks, and raise if one must not be built on."""
        with self.between.during("hear"):
            self._ledger.settle(until=None, gradients_left=self._holdings.has_gradients)

    def _fill(self, step: Step, each: Sequence[Told]) -> None:
        """Put into what the ranks tell the records that are settled: of this step, or else of the last one."""
        if self._late:
            for told, record in zip(each, self.settled(self._late), strict=True):
                told.late = record
        self._late = step.drafts
        if all(clock.settle(draft, wait=False) for clock, draft in zip(self._clocks, step.drafts, strict=True)):
            self._late = ()
            for told, draft in zip(each, step.drafts, strict=True):
                told.record = draft.record()

    def settled(self, drafts: Sequence[Draft]) -> list[Record]:
        """Return the records of a step on this process's ranks; waits for the device."""
        for draft, clock in zip(drafts, self._clocks, strict=True):
            clock.settle(draft, wait=True)
        return [draft.record() for draft in drafts]

    def _add(self, tally: Tally, each: Sequence[Told]) -> None:
        if self.folder is None or not self.folder.is_open:
            return
        self.waiting()
        self._unwritten += [record for told in each for record in (told.late, told.record) if record is not None]
        if 0 in self._ranks:
            self._waiting.append((tally, {}))

    def waiting(self) -> None:
        """Write the lines of earlier steps, and the metrics of those that all ranks have told of."""
        if self._unwritten and self.folder is not None and self.folder.is_open:
            self._write(self.folder)
            self.folder.flush_if_due()

    def _write(self, folder: RunFolder) -> None:
        for record in self._unwritten:
            folder.add_record(record)
        self._unwritten = []
        while self._waiting and self._waiting[0][0].is_complete:
            tally, noted = self._waiting.pop(0)
            if self._has_clocks and time.monotonic() > self._read_until:
                self._dials, self._read_until = self._ledger.dials(tally), time.monotonic() + _SECONDS_TO_READ
            folder.add_metrics(tally.number, tally.metrics(noted, self._dials))

    def note(self, **metrics: Any) -> None:
        """Add metrics to the last step."""
        if self._waiting:
            self._waiting[-1][1].update(metrics)

    def failed(self) -> None:
        """Write all that is known out."""
        if self.folder is not None and self.folder.is_open:
            self._write(self.folder)
            self.folder.flush()

    def close(self) -> None:
        """Write what is left, as far as it is known, and end the run."""
        if self.folder is not None and self.folder.is_open:
            if self._late:
                self._unwritten += self.settled(self._late)
                self._late = ()
            if self._crew.alone and not self._crew.over:
                for tally, _ in self._waiting:
                    tally.told  # noqa: B018 - all ranks of one process have told, so that hearing waits for nobody
            self._write(self.folder)
            self.folder.close()

    def __del__(self) -> None:
        self.close()

    def check(self) -> None:
        """Refuse to say what was not recorded."""
        if not self.is_on:
            raise RunError("nothing was recorded: record=False", fix="make the pipeline with record=True or a folder")


# Whoever forgets to close the pipeline, or only ends the process, has the run all the same.
_open: weakref.WeakSet[Recording] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for recording in list(_open):
        recording.close()
