"""What every rank does: rows of actions, and their text form.

    0F0,0F1,0B0,0B1        one row per rank, one cell per action; an empty cell is an idle slot
    1F0,1B0,1F1,1B1        and has no effect: an action runs as soon as what it waits for has finished

    0F0.0,0F0.1,0B0.1,0B0.0    microbatches in two slices: every action that names a microbatch names its slice

The text format is PyTorch's own, so each of the two can load files that the other wrote, unless they have slices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import islice
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from drumline.core import placement
from drumline.core.action import (
    COMPUTE_OPS,
    TIMED_OPS,
    TRANSFER_OPS,
    WAIT_OPS,
    WITHOUT_MICROBATCH,
    Action,
    Op,
)
from drumline.core.errors import ProgramError
from drumline.core.files import MIB, FileKind, named, read_text
from drumline.core.graph import CODE, OPS, Columns
from drumline.core.kernel.library import kernel
from drumline.core.kernel.text import OpNames, read, written
from drumline.core.placement import Placement
from drumline.core.rules import Backward

Row = tuple[Action, ...]

# In arrays an action takes some 50 bytes while it is timed; as an object it takes hundreds, and microseconds.
MAX_IN_ARRAYS = 50_000_000
MAX_ACTIONS = 1_000_000  # as objects: rows, text without the kernel, pictures
MAX_FILE_BYTES = 512 * MIB
_SPELLING = OpNames(tuple(OPS), frozenset(WITHOUT_MICROBATCH), frozenset(COMPUTE_OPS), Op.OVERLAP)
_KIND = FileKind("program", ProgramError, "a CSV file, one row of actions per rank", MAX_FILE_BYTES)


@dataclass(frozen=True)
class Program:
    r"""The rows of all ranks. Programs with the same rows and slices are equal; the name is only for people.

    `num_slices` says in how many slices each microbatch runs: slice s of microbatch m has the number m*S + s in its
    actions, and is a unit of its own there.

    >>> program = Program.parse("0F0,0B0\n1F0,1B0")
    >>> program.num_ranks, program.num_stages, program.num_microbatches
    (2, 2, 1)
    >>> print(program.format())
    0F0,0B0
    1F0,1B0
    >>> program = Program.parse("0F0.0,0F0.1,0B0.1,0B0.0")
    >>> program.num_microbatches, program.num_slices, program.num_units
    (1, 2, 2)
    """

    rows: tuple[Row, ...]
    name: str = field(default="custom", compare=False)
    num_slices: int = 1

    def __post_init__(self) -> None:
        if self.num_slices < 1:
            raise ProgramError(f"num_slices is {self.num_slices}", expected="1 or more slices of each microbatch")
        if self.num_slices > 1:
            self.__dict__["rows"] = self.columns.rows()

    @staticmethod
    def of_columns(columns: Columns, name: str = "custom") -> Program:
        """Build a program from arrays; its rows are made when somebody looks at them.

        >>> program = Program.of_columns(Program.parse("0F0,0B0").columns)
        >>> program.num_actions, print(program)
        0F0,0B0
        (2, None)
        """
        program = object.__new__(Program)
        program.__dict__.update(name=name, columns=columns, num_slices=columns.num_slices)
        return program

    def __getattr__(self, name: str) -> Any:
        if name != "rows" or "columns" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        if self.num_actions > MAX_ACTIONS:
            raise ProgramError(
                f"{self.name} has {self.num_actions} actions, too many to look at one by one",
                expected=f"at most {MAX_ACTIONS}; times, idle time and memory are computed for up to {MAX_IN_ARRAYS}",
                fix="use fewer microbatches: a step repeats itself, so the result looks the same",
            )
        self.__dict__["rows"] = rows = self.columns.rows()
        return rows

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Program):
            return NotImplemented
        if "rows" in self.__dict__ and "rows" in other.__dict__:
            return self.num_slices == other.num_slices and self.rows == other.rows
        return self.columns.same(other.columns)

    def __hash__(self) -> int:
        columns = self.columns
        return hash(
            (
                columns.lengths,
                self.num_slices,
                *(each.tobytes() for each in (columns.stage, columns.code, columns.microbatch)),
            )
        )

    @staticmethod
    def of(rows: Iterable[Iterable[Action]], name: str = "custom", num_slices: int = 1) -> Program:
        """Build a program from any nested iterable of actions.

        >>> Program.of([[Action(0, Op.FORWARD, 0)]]).format()
        '0F0'
        """
        return Program(tuple(tuple(row) for row in rows), name, num_slices)

    def rearranged(self, rows: Iterable[Iterable[Action]], name: str = "") -> Program:
        """Return a program of other rows for the same microbatches and slices, under the same name unless given one.

        >>> Program.parse("0F0.0,0F0.1", "two").rearranged([[Action(0, Op.FORWARD, 1)]])
        Program('two', num_ranks=1, num_stages=1, num_microbatches=1, num_slices=2)
        """
        return Program.of(rows, name or self.name, self.num_slices)

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks, that is rows."""
        return len(self.rows) if "rows" in self.__dict__ else self.columns.num_ranks

    @cached_property
    def columns(self) -> Columns:
        """The rows as arrays."""
        return Columns.of(self.rows, self.num_slices)

    @cached_property
    def timed_columns(self) -> Columns:
        """The rows as arrays, without actions that take no rank time: messages, WAITs and gradient exchanges."""
        return self.columns.only(self.columns.timed)

    @cached_property
    def timed_rows(self) -> tuple[Row, ...]:
        """The rows without actions that take no rank time."""
        return self.rows if self.timed_columns is self.columns else self.without(set(Op) - TIMED_OPS).rows

    @cached_property
    def num_stages(self) -> int:
        """Number of stages: the highest stage number in the rows plus one."""
        return 1 + int(self.columns.stage.max(initial=-1))

    @cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches over all steps: as many as the highest number in the rows needs."""
        return -(-(1 + int(self.columns.microbatch.max(initial=-1))) // self.num_slices)

    @property
    def num_units(self) -> int:
        """Number of what runs by itself, as actions count it: all slices of all microbatches."""
        return self.num_microbatches * self.num_slices

    @cached_property
    def num_actions(self) -> int:
        """Number of actions in all rows; an overlapped pair counts as one."""
        return sum(map(len, self.rows)) if "rows" in self.__dict__ else sum(self.columns.lengths)

    @cached_property
    def placement(self) -> Placement:
        """The rank that runs each (stage, microbatch), according to most of the rows."""
        return self.agreed_placement or placement.infer(self.rows)

    @cached_property
    def agreed_placement(self) -> Placement | None:
        """The placement that all rows agree with, or None."""
        return placement.consistent(self.columns)

    @cached_property
    def has_communication(self) -> bool:
        """Whether the rows contain sends and receives."""
        return not TRANSFER_OPS.isdisjoint(self.columns.ops)

    @cached_property
    def has_backward(self) -> bool:
        """Whether the program trains; without backwards it is inference and stashes nothing."""
        return not (COMPUTE_OPS - {Op.FORWARD}).isdisjoint(self.columns.ops)

    @cached_property
    def backwards(self) -> tuple[Backward, ...]:
        """The backward of each stage: whole, I only, or none because the stage is frozen."""
        return self.columns.backwards(self.num_stages)

    @cached_property
    def num_updates(self) -> int:
        """Number of optimizer steps inside the program; 0 for a flushed program, where the user steps."""
        columns = self.columns
        return len(set(columns.microbatch[columns.code == CODE[Op.UPDATE]].tolist()))

    def work(self) -> Iterator[Action]:
        """Yield every plain action, including both halves of overlapped pairs, rank by rank."""
        for row in self.rows:
            for action in row:
                yield from action.work

    def compute_only(self) -> Program:
        r"""Return the program without messages, waits and parameter state; gradient exchanges and updates stay.

        >>> Program.parse("0F0,0SEND_F0\n1RECV_F0,1F0").compute_only().format()
        '0F0\n1F0'
        """
        return self.without(TRANSFER_OPS | WAIT_OPS | {Op.UNSHARD, Op.RESHARD})

    def without(self, ops: Set[Op]) -> Program:
        """Return the program without the actions of these ops.

        >>> Program.parse("0F0,0B0,0REDUCE_GRAD").without({Op.REDUCE_GRAD}).format()
        '0F0,0B0'
        """
        return self.rearranged([action for action in row if action.op not in ops] for row in self.rows)

    def format(self) -> str:
        """Return the text form: one line per rank, actions separated by commas."""
        if "rows" not in self.__dict__ and (text := self._written()) is not None:
            return text
        return "\n".join(",".join(map(str, row)) for row in self.rows)

    __str__ = format

    def _written(self) -> str | None:
        """Return the text of arrays that the kernel can write."""
        columns = self.columns
        if kernel() is None or not all(columns.lengths) or columns.stage.min(initial=0) < 0:
            return None
        numbers = [np.ascontiguousarray(each, np.int32) for each in (columns.stage, columns.code, columns.microbatch)]
        return written(columns.lengths, numbers, columns.paired, _SPELLING, self.num_slices)

    def __repr__(self) -> str:
        counts = f"num_ranks={self.num_ranks}, num_stages={self.num_stages}"
        slices = f", num_slices={self.num_slices}" if self.num_slices > 1 else ""
        return f"Program({self.name!r}, {counts}, num_microbatches={self.num_microbatches}{slices})"

    @staticmethod
    def parse(text: str, name: str = "custom") -> Program:
        """Parse a program, or raise ProgramError with row and column.

        >>> Program.parse("0F0,,0B0,0F0junk")
        Traceback (most recent call last):
        drumline.core.errors.ProgramError: row 1, column 4: '0F0junk' is not an action; ...
        """
        cells = read(text, _SPELLING, MAX_IN_ARRAYS)
        if isinstance(cells, int):
            raise _too_many(cells, MAX_IN_ARRAYS)
        if cells is not None:
            return _with_all_slices(Program.of_columns(Columns.spread(*cells), name))
        known: dict[str, Action] = {}
        num_slices = _slices_in(text)
        rows: list[Row] = []
        left = MAX_ACTIONS
        lines = text.rstrip().splitlines()
        for number, line in enumerate(lines, start=1):
            row = tuple(islice(_parse_row(line, number, known, num_slices), left + 1))
            left -= len(row)
            if left < 0:
                raise _too_many(number, MAX_ACTIONS)
            if not row:
                raise ProgramError(
                    f"row {number} of {len(lines)} is empty, so rank {number - 1} would do nothing",
                    expected="one row of actions per rank",
                    fix="add the rank's row or remove the line",
                )
            rows.append(row)
        if not rows:
            raise ProgramError("the text contains no action", expected="one row of actions per rank, like 0F0,0B0")
        return _with_all_slices(Program(tuple(rows), name, num_slices))

    @staticmethod
    def load(path: str | Path) -> Program:
        """Read a CSV file written by Drumline or by PyTorch's pipelining; bounded in time and memory.

        >>> Program.load("no-such-file.csv")
        Traceback (most recent call last):
        drumline.core.errors.ProgramError: cannot read no-such-file.csv: No such file or directory; ...
        """
        path = Path(path)
        text = read_text(path, _KIND)
        with named(path, _KIND):
            program = Program.parse(text, name=path.stem)
        stages = program.columns.stage
        is_there = np.zeros(min(program.num_stages, len(stages) + 1), dtype=bool)
        is_there[stages[stages < len(is_there)]] = True
        if missing := np.flatnonzero(~is_there).tolist():
            raise ProgramError(
                f"{path}: no rank runs stage {missing[0]}, though the file has a stage {program.num_stages - 1}",
                expected=f"all stages from 0 to {program.num_stages - 1} in the file's {program.num_ranks} rows",
                fix="add the missing rank's row, or renumber the stages",
            )
        return program

    def save(self, path: str | Path) -> None:
        """Write the text form to a file."""
        Path(path).write_text(self.format() + "\n", encoding="utf-8")


_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def once_per_program(
    make: Callable[Concatenate[Program, _Arguments], _Result],
) -> Callable[Concatenate[Program, _Arguments], _Result]:
    """Cache a function of a program: it computes once per program object and arguments.

    >>> @once_per_program
    ... def size(program: Program) -> int:
    ...     print("counts")
    ...     return program.num_actions
    >>> program = Program.parse("0F0,0B0")
    >>> size(program), size(program)
    counts
    (2, 2)
    """

    @wraps(make)
    def cached(program: Program, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        results: dict[object, _Result] = program.__dict__.setdefault("_results", {})
        key = (make.__module__, make.__qualname__, arguments, *sorted(named.items()))
        if key not in results:
            results[key] = make(program, *arguments, **named)
        return results[key]

    return cached


def _too_many(row: int, most: int) -> ProgramError:
    return ProgramError(f"row {row}: more than {most} actions", expected="a smaller program")


_SLICE = re.compile(r"[0-9]\.([0-9]{1,9})(?![0-9])")


def _slices_in(text: str) -> int:
    """Return how many slices the actions of a text name, if they name any."""
    return 1 + max(map(int, _SLICE.findall(text)), default=0) if "." in text else 1


def _with_all_slices(program: Program) -> Program:
    """Return a program; raise an error if not all of its microbatches have all slices."""
    count, numbers = program.num_slices, program.columns.microbatch
    if count == 1:
        return program
    present = np.unique(numbers[numbers >= 0])
    microbatch, first, found_slices = np.unique(present // count, return_index=True, return_counts=True)
    for at in np.flatnonzero(found_slices < count)[:1].tolist():
        there = set((present[first[at] : first[at] + found_slices[at]] % count).tolist())
        missing = next(number for number in range(count) if number not in there)
        raise ProgramError(
            f"microbatch {microbatch[at]} has no slice {missing}, though an action names slice {count - 1}",
            expected="the same slices of every microbatch, counted from 0",
        )
    return program


def _parse_row(line: str, number: int, known: dict[str, Action], num_slices: int) -> Iterator[Action]:
    for column, cell in enumerate(line.split(","), start=1):
        text = cell.strip()
        if not text:
            continue
        action = known.get(text)
        if action is None:
            try:
                action = known[text] = Action.parse(text, num_slices)
            except ProgramError as error:
                where = f"row {number}, column {column}"
                raise ProgramError(f"{where}: {error.error}", expected=error.expected, fix=error.fix) from None
        yield action
