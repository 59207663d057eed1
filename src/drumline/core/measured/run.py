"""Read a recorded run from its folder, even while the run is still writing it.

    config.json  plan.json  program.csv  environment.json      written once, by rank 0
    rank0.jsonl  rank1.jsonl  ...                              a line per step, each by its own rank
    metrics.jsonl                                              a line per step, by rank 0
    program-1.csv  program-2.csv  ...                          if steps used other programs: their lines say which
    decisions.jsonl                                            if the run adapts: what was changed, and what came of it
    ended.json                                                 written when rank 0 closes the run

Only complete lines count, so the unfinished line of a killed rank is ignored. A step exists once all ranks wrote it.
Every line and object names its run, which distinguishes files of different runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

from drumline.core.errors import DrumlineError, RecordError, counted
from drumline.core.files import MIB, FileKind, is_there, named, opened, parse_object, read_object
from drumline.core.measured.align import Dial, align
from drumline.core.measured.measured import Measured
from drumline.core.measured.record import LINE, MOST_PROGRAMS, Record, read_record
from drumline.core.parsed import LARGEST, Parsed, shown
from drumline.core.program import Program
from drumline.core.prove.validate import validate

FORMAT = 1
_STEPS_AROUND = 8  # used to find clock drift, which matters only within a step: enough to know it well
CONFIG, PLAN, PROGRAM, ENVIRONMENT = "config.json", "plan.json", "program.csv", "environment.json"
METRICS, DECISIONS, ENDED = "metrics.jsonl", "decisions.jsonl", "ended.json"
OPENING = re.compile(rb'\{"run":"([^"]*)","step":(\d{1,15}),')


def rank_file(rank: int) -> str:
    """Return the name of a rank's file.

    >>> rank_file(3)
    'rank3.jsonl'
    """
    return f"rank{rank}.jsonl"


def program_file(number: int) -> str:
    """Return the name of the file of a program by its number; 0 is the one that steps run by unless they name another.

    >>> program_file(0), program_file(2)
    ('program.csv', 'program-2.csv')
    """
    return f"program-{number}.csv" if number else PROGRAM


def read_run(path: str | Path) -> Run:
    """Read the run in a folder.

    >>> read_run("no-such-folder")
    Traceback (most recent call last):
    drumline.core.errors.RecordError: no such folder: no-such-folder; pass the folder you gave to record=
    """
    return Run(path)


class Run:
    """A recorded run. `steps` holds the numbers of the steps that all ranks have written; it grows with the run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not is_there(path, _FOLDER) or not self.path.is_dir():
            raise RecordError(f"no such folder: {path}", fix="pass the folder you gave to record=")
        if not is_there(self.path / CONFIG, _FILE):
            raise RecordError(
                f"{path} does not contain a run", expected=f"a folder with {CONFIG}", fix="pass the run's own folder"
            )
        self.config = self._object(CONFIG)
        self.id = str(self.config["run"])
        if self.config.get("format") != FORMAT:
            raise RecordError(
                f"the run in {path} uses the format {shown(self.config.get('format'))}",
                expected=f"{FORMAT}, the format this version of drumline reads",
            )
        self.plan = self._object(PLAN)
        self.environment = self._object(ENVIRONMENT)
        self.program = self._program(0)
        self._programs = {0: self.program}
        _check_plan(self.path / PLAN, self.plan, self.program)
        self._ranks = [_Lines(self.path / rank_file(rank), self.id) for rank in range(self.program.num_ranks)]
        self._metrics = _Lines(self.path / METRICS, self.id)
        missing = [str(rank) for rank, lines in enumerate(self._ranks) if not is_there(lines.path, _FILE)]
        if missing:
            raise RecordError(
                f"{path} contains no record of rank {', '.join(missing)}",
                expected=f"files of all {counted(self.program.num_ranks, 'rank')}",
                fix="copy the files that other hosts wrote into this folder",
            )

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, {self.program.name!r}, num_steps={self.num_steps})"

    @property
    def steps(self) -> tuple[int, ...]:
        """The numbers of the steps that all ranks have written so far."""
        first, *others = [lines.known() for lines in self._ranks]
        return tuple(step for step in first if all(step in other for other in others))

    @property
    def num_steps(self) -> int:
        """How many steps all ranks have written so far."""
        return len(self.steps)

    def record(self, rank: int, step: int) -> Record:
        """Return what one rank measured in a step."""
        table = self._ranks[rank].read(step)
        try:
            return read_record(table, self._by(table.get("program", 0)), rank, step)
        except RecordError as error:
            raise RecordError(
                f"the line of step {step} in {self._ranks[rank].path} is not a record: {error.error}",
                expected=error.expected,
            ) from None

    def program_of(self, step: int) -> Program:
        """Return the program that a step ran by."""
        return self._by(self._ranks[0].read(step).get("program", 0))

    def _by(self, number: Any) -> Program:
        """Return the program of a number."""
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MOST_PROGRAMS:
            raise RecordError(f"a damaged record: program is {shown(number)}", expected="the number of a program")
        if number not in self._programs:
            program = self._programs[number] = self._program(number)
            if program.num_ranks != self.program.num_ranks or program.num_stages != self.program.num_stages:
                raise RecordError(
                    f"{self.path / program_file(number)} is for other ranks or stages than {PROGRAM}", expected=_WROTE
                )
        return self._programs[number]

    def timeline(self, step: int | None = None) -> Measured:
        """Return the timeline of a step over all ranks; the last step by default."""
        steps = self.steps
        if not steps:
            raise RecordError(f"no step in {self.path} is complete on all ranks yet", fix="wait for the first step")
        if step is None:
            step = steps[-1]
        elif step not in steps:
            raise RecordError(f"{self.path} has no step {step}", expected=f"step {_ranges(steps)}")
        records = self._records(step)
        if not all(record.starts for record in records):
            raise RecordError(f"step {step} was captured, so its actions have no times", fix="choose another step")
        dials: tuple[Dial, ...] = ()
        if len({record.clock for record in records}) > 1:
            at = steps.index(step)
            around = steps[max(at - _STEPS_AROUND, 0) : at + _STEPS_AROUND + 1]
            dials = align([self._records(number) for number in around], around.index(step))
        program = self._by(records[0].program)
        # The first step's bytes say what a step holds that runs by the same program.
        weighed = self._weighed if self._weighed[0].program == records[0].program else ()
        timeline = Measured(program, records, weighed, dials)
        if not timeline.makespan > 0:
            raise RecordError(f"step {step} in {self.path} took 0 seconds", expected="a step that ran")
        return timeline

    def _records(self, step: int) -> tuple[Record, ...]:
        return tuple(self.record(rank, step) for rank in range(self.program.num_ranks))

    @cached_property
    def _weighed(self) -> tuple[Record, ...]:
        """The records of the first step, which are weighed unless it was captured: every step holds the same."""
        return self._records(self.steps[0])

    def metrics(self, *, since: int = 0) -> list[dict[str, Any]]:
        """Return the metrics of all steps written so far, without the first `since`."""
        return [self._numbers(step) for step in islice(self._metrics.known(), since, None)]

    def _numbers(self, step: int) -> dict[str, Any]:
        """Return the metrics of a step: numbers by name, or None for non-finite values."""
        metrics = self._metrics.read(step)
        for name, value in metrics.items():
            if name != "run" and value is not None:
                if type(value) not in (int, float, bool) or len(name) > _LONGEST_NAME:
                    raise RecordError(
                        f"the line of step {step} in {self._metrics.path} has {shown(value)} for {name[:60]!r}",
                        expected="a number for every name",
                    )
                if not -LARGEST <= value <= LARGEST:
                    metrics[name] = None  # treat it like infinity
        return metrics

    def decisions(self) -> list[dict[str, Any]]:
        """Return what was changed during the run, and what came of it, in order; empty if nothing was."""
        path = self.path / DECISIONS
        if not is_there(path, _FILE):
            return []
        with opened(path, _FILE) as file:
            text = file.read(LINE.max_bytes)
        decisions = []
        for line in text.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break  # a killed rank's
            with named(path, _FILE):
                entry = parse_object(line, _FILE)
                table = Parsed(entry, _FILE)
                _check_run(path, table["run"].text(), self.id)
                table["step"].whole()
                table["kind"].text()
            decisions.append(entry)
        return decisions

    @property
    def has_ended(self) -> bool:
        """Whether rank 0 has closed the run; a run that was killed never has."""
        return is_there(self.path / ENDED, _FILE)

    def _object(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not is_there(path, _FILE):
            raise RecordError(f"{path} is missing", expected="all files of the run in one folder")
        content = read_object(path, _FILE)
        if not isinstance(content.get("run"), str):
            raise RecordError(f"{path} does not name a run", expected="the file as the run wrote it")
        if name != CONFIG:
            _check_run(path, content["run"], self.id)
        return content

    def _program(self, number: int) -> Program:
        path = self.path / program_file(number)
        try:
            program = Program.load(path)
        except DrumlineError as error:
            raise RecordError(error.error, expected="the program as the run wrote it") from None
        if number and self.program.num_updates:
            # What a step without a flush runs is a part of endless rows: only they make sense as a whole.
            if program.placement.homes != self.program.placement.homes:
                raise RecordError(f"{path} has stages on other ranks", expected="the program as the run wrote it")
        elif violations := validate(program):
            raise RecordError(f"{path} cannot have run: {violations[0]}", expected="the program as the run wrote it")
        return replace(program, name=self.name_of(number))

    def _settings(self) -> dict[str, Any]:
        settings = self.config.get("settings")
        return settings if isinstance(settings, dict) else {}

    @property
    def is_served(self) -> bool:
        """Whether `drumline serve` wrote this run: its steps are whatever clients asked for."""
        return "served" in self._settings()

    def name_of(self, number: int) -> str:
        """Return what a program is called: the schedule, the name that the user gave it, or its number."""
        if not number:
            return str(self.plan.get("schedule"))
        if self.program.num_updates:
            return f"{self.program.name} step"
        named = self._settings().get("programs")
        names = list(named) if isinstance(named, dict) else []
        return names[number - 1] if number <= len(names) else f"program {number}"


_WROTE = "the file as the run wrote it"
_FOLDER = FileKind("run", RecordError, "the folder you gave to record=")
_FILE = FileKind("run", RecordError, _WROTE)
_LONGEST_NAME = 200
_MOST_STEPS = 10**7


def _check_plan(path: Path, plan: dict[str, Any], program: Program) -> None:
    """Raise an error if the plan's parts are not what reports expect."""
    with named(path, _FILE):
        table = Parsed(plan, _FILE)
        table["schedule"].text()
        if plan.get("blocks") is not None:
            if len(table["blocks"].each()) != program.num_stages:
                raise table["blocks"].refuse(f"the blocks of {counted(program.num_stages, 'stage')}")
            for stage in table["blocks"].each():
                for block in stage.each():
                    block.text()
        for name in ("guessed_costs", "trained_shares"):
            if plan.get(name) is not None:
                for number in table[name].each():
                    number.number()
        predicted = plan.get("predicted")
        if predicted is not None and table["predicted"].get("blocks") is not None and predicted["blocks"] is not None:
            for block in table["predicted"]["blocks"].each():
                for name in ("forward", "backward", "backward_input", "backward_weight"):
                    block[name].number()


class _Lines:
    """A file of lines that may grow; knows where the line of each step is."""

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self.run = run
        self._end = 0  # the end of the last complete line
        self._file: int | None = None  # which file it was
        self._places: dict[int, tuple[int, int]] = {}

    def known(self) -> Mapping[int, tuple[int, int]]:
        """Return where the lines are so far, by step."""
        if not is_there(self.path, _FILE):
            return self._places
        with opened(self.path, _FILE) as file:
            status = os.fstat(file.fileno())
            if self._file not in (None, status.st_ino) or status.st_size < self._end:
                self._places, self._end = {}, 0  # the run continues from an earlier step
            self._file = status.st_ino
            if status.st_size == self._end:
                return self._places
            file.seek(self._end)
            while (line := file.readline(LINE.max_bytes)).endswith(b"\n"):
                self._places[self._step(line)] = (self._end, len(line))
                self._end += len(line)
        if len(line) == LINE.max_bytes or len(self._places) > _MOST_STEPS:
            most = f"a line of {LINE.max_bytes // MIB} MiB" if line else f"{_MOST_STEPS} steps"
            raise RecordError(f"{self.path} has more than {most}", expected=_WROTE)
        return self._places

    def _step(self, line: bytes) -> int:
        opening = OPENING.match(line)
        if opening is None:
            raise RecordError(
                f"line {len(self._places) + 1} of {self.path} was not written by a run", fix="remove the line"
            )
        _check_run(self.path, opening[1].decode(errors="backslashreplace"), self.run)
        return int(opening[2])

    def read(self, step: int) -> dict[str, Any]:
        """Return the line of a step."""
        start, size = self._places[step]
        with opened(self.path, _FILE) as file:
            file.seek(start)
            line = file.read(size)
        try:
            return parse_object(line, LINE)
        except RecordError as error:
            raise RecordError(
                f"the line of step {step} in {self.path}: {error.error}", expected=error.expected
            ) from None


def _check_run(path: Path, named: str, run: str) -> None:
    if named != run:
        raise RecordError(
            f"{path} belongs to the run {named}",
            expected=f"{run}, the run in {CONFIG}",
            fix="use a separate folder for every run",
        )


def _ranges(steps: tuple[int, ...]) -> str:
    return f"{steps[0]} to {steps[-1]}" if len(steps) > 1 else str(steps[0])
