"""What every rank will do: rows of actions, and their text form.

    0F0,0F1,0B0,0B1        one row per rank, one cell per action; an empty cell is an idle slot
    1F0,1B0,1F1,1B1        and means nothing: when an action runs follows from what it waits for

The text is PyTorch's own, so a file written here loads there and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cached_property, wraps
from itertools import islice
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from drumline.core import placement
from drumline.core.action import COMPUTE_OPS, TIMED_OPS, TRANSFER_OPS, WAIT_OPS, Action, Op
from drumline.core.errors import ProgramError
from drumline.core.files import MIB, Kind, named, read_text
from drumline.core.placement import Placement
from drumline.core.rules import Backward
from drumline.core.simulate.graph import CODE, Columns

Row = tuple[Action, ...]

# A million actions are 64 ranks x 4 stages x 1000 microbatches: what is larger is not a program that anybody runs.
MAX_ACTIONS = 1_000_000
MAX_FILE_BYTES = 64 * MIB
_KIND = Kind("program", ProgramError, "a CSV file, one row of actions per rank", MAX_FILE_BYTES)


@dataclass(frozen=True)
class Program:
    r"""All ranks' rows. Two programs are equal when their rows are; the name is only for people.

    >>> program = Program.parse("0F0,0B0\n1F0,1B0")
    >>> program.num_ranks, program.num_stages, program.num_microbatches
    (2, 2, 1)
    >>> print(program.format())
    0F0,0B0
    1F0,1B0
    """

    rows: tuple[Row, ...]
    name: str = field(default="custom", compare=False)

    @staticmethod
    def of(rows: Iterable[Iterable[Action]], name: str = "custom") -> Program:
        """Return the program of any nested iterable of actions.

        >>> Program.of([[Action(0, Op.FORWARD, 0)]]).format()
        '0F0'
        """
        return Program(tuple(tuple(row) for row in rows), name)

    @cached_property
    def num_ranks(self) -> int:
        """How many ranks execute a row."""
        return len(self.rows)

    @cached_property
    def columns(self) -> Columns:
        """The rows as arrays."""
        return Columns.of(self.rows)

    @cached_property
    def timed_columns(self) -> Columns:
        """The same without what takes no time of a rank: messages, WAITs and gradient exchanges."""
        return self.columns.only(self.columns.timed)

    @cached_property
    def timed_rows(self) -> tuple[Row, ...]:
        """The rows without what takes no time of a rank."""
        return self.rows if self.timed_columns is self.columns else self.without(set(Op) - TIMED_OPS).rows

    @cached_property
    def num_stages(self) -> int:
        """How many stages the rows speak of: the highest number plus one."""
        return 1 + int(self.columns.stage.max(initial=-1))

    @cached_property
    def num_microbatches(self) -> int:
        """How many microbatches the rows speak of: the highest number plus one, over all steps."""
        return 1 + int(self.columns.microbatch.max(initial=-1))

    @cached_property
    def num_actions(self) -> int:
        """How many actions all rows hold; an overlapped pair is one."""
        return sum(map(len, self.rows))

    @cached_property
    def placement(self) -> Placement:
        """Which rank runs (stage, microbatch), as most of the rows say."""
        return self.agreed_placement or placement.infer(self.rows)

    @cached_property
    def agreed_placement(self) -> Placement | None:
        """The placement that all of the rows agree with, or None."""
        return placement.consistent(self.columns)

    @cached_property
    def has_communication(self) -> bool:
        """Whether sends and receives are spelled out."""
        return not TRANSFER_OPS.isdisjoint(self.columns.ops)

    @cached_property
    def has_backward(self) -> bool:
        """Whether anything is trained; without, it is inference and nothing is stashed."""
        return not (COMPUTE_OPS - {Op.FORWARD}).isdisjoint(self.columns.ops)

    @cached_property
    def backwards(self) -> tuple[Backward, ...]:
        """What each stage does of its backward: the whole, I alone, or nothing because it is frozen."""
        return self.columns.backwards(self.num_stages)

    @cached_property
    def num_updates(self) -> int:
        """How many optimizer steps the program itself takes; 0 for a flushed one, where the user takes it."""
        columns = self.columns
        return len(set(columns.microbatch[columns.code == CODE[Op.UPDATE]].tolist()))

    def work(self) -> Iterator[Action]:
        """Yield every plain action, both halves of overlapped pairs included, rank by rank."""
        for row in self.rows:
            for action in row:
                yield from action.work

    def compute_only(self) -> Program:
        r"""Return the program without messages, waits and parameter state; gradient exchange and updates stay.

        >>> Program.parse("0F0,0SEND_F0\n1RECV_F0,1F0").compute_only().format()
        '0F0\n1F0'
        """
        return self.without(TRANSFER_OPS | WAIT_OPS | {Op.UNSHARD, Op.RESHARD})

    def without(self, ops: Set[Op]) -> Program:
        """Return the program without the actions of these ops.

        >>> Program.parse("0F0,0B0,0REDUCE_GRAD").without({Op.REDUCE_GRAD}).format()
        '0F0,0B0'
        """
        return Program.of(([action for action in row if action.op not in ops] for row in self.rows), self.name)

    def format(self) -> str:
        """Return the text form: one line per rank, actions separated by commas."""
        return "\n".join(",".join(map(str, row)) for row in self.rows)

    __str__ = format

    def __repr__(self) -> str:
        counts = f"num_ranks={self.num_ranks}, num_stages={self.num_stages}"
        return f"Program({self.name!r}, {counts}, num_microbatches={self.num_microbatches})"

    @staticmethod
    def parse(text: str, name: str = "custom") -> Program:
        """Return the program that `text` spells, or raise ProgramError with row and column.

        >>> Program.parse("0F0,,0B0,0F0junk")
        Traceback (most recent call last):
        drumline.core.errors.ProgramError: row 1, column 4: '0F0junk' is not an action; ...
        """
        known: dict[str, Action] = {}
        rows: list[Row] = []
        left = MAX_ACTIONS
        lines = text.rstrip().splitlines()
        for number, line in enumerate(lines, start=1):
            row = tuple(islice(_parse_row(line, number, known), left + 1))
            left -= len(row)
            if left < 0:
                raise ProgramError(
                    f"row {number}: more than {MAX_ACTIONS} actions", expected="a program that can be run"
                )
            if not row:
                raise ProgramError(
                    f"row {number} of {len(lines)} is empty, so rank {number - 1} would do nothing",
                    expected="one row of actions per rank",
                    fix="add the rank's row or remove the line",
                )
            rows.append(row)
        if not rows:
            raise ProgramError("the text holds no action", expected="one row of actions like 0F0,0B0 per rank")
        return Program(tuple(rows), name)

    @staticmethod
    def load(path: str | Path) -> Program:
        """Read a CSV file, as this or PyTorch's pipelining writes it; bounded in time and memory.

        >>> Program.load("no-such-file.csv")
        Traceback (most recent call last):
        drumline.core.errors.ProgramError: no-such-file.csv cannot be read: No such file or directory; ...
        """
        path = Path(path)
        text = read_text(path, _KIND)
        with named(path, _KIND):
            program = Program.parse(text, name=path.stem)
        present = {part.stage for part in program.work()}
        if missing := sorted(set(range(min(program.num_stages, len(present) + 1))) - present):
            raise ProgramError(
                f"{path}: stage {missing[0]} appears on no rank, though stage {program.num_stages - 1} does",
                expected=f"all of the stages 0 to {program.num_stages - 1} in the file's {program.num_ranks} rows",
                fix="a rank's row is missing, or stages are misnumbered",
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
    """Let a function of a program compute once for the same program object and arguments, and keep what it returned.

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
    def kept(program: Program, /, *arguments: _Arguments.args, **named: _Arguments.kwargs) -> _Result:
        results: dict[object, _Result] = program.__dict__.setdefault("_results", {})
        key = (make.__module__, make.__qualname__, arguments, *sorted(named.items()))
        if key not in results:
            results[key] = make(program, *arguments, **named)
        return results[key]

    return kept


def _parse_row(line: str, number: int, known: dict[str, Action]) -> Iterator[Action]:
    for column, cell in enumerate(line.split(","), start=1):
        text = cell.strip()
        if not text:
            continue
        action = known.get(text)
        if action is None:
            try:
                action = known[text] = Action.parse(text)
            except ProgramError as error:
                where = f"row {number}, column {column}"
                raise ProgramError(f"{where}: {error.error}", expected=error.expected, fix=error.fix) from None
        yield action
