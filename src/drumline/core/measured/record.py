"""What one rank measured in one step: times by its own clock, in whole nanoseconds, in flat tables.

    starts     100  350       a table with one column: one number per timed action
    ends       300  600
    waits      0  300  350    several columns are stored row by row: here message 0, from 300 to 350

Ranks send each other records, and the files of a run store them, so a record is small and easy to send. `Measured` says
what the records of all ranks mean together.

A record holds indices into its program, its messages and the other ranks. A bad index would fail much later. So reading
a line of a run's file checks every column by its name and rejects what no run could have written.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.errors import RecordError, counted
from drumline.core.files import FileKind
from drumline.core.parsed import Parsed
from drumline.core.program import Program, once_per_program

# A message is named by its receive: stage, op as an index into RECEIVES, microbatch (-1 if it has none).
RECEIVES = (Op.RECV_F, Op.RECV_B, Op.REDUCE_GRAD)
_MESSAGE = ("stage", "op", "microbatch")

COLUMNS: dict[str, tuple[str, ...]] = {
    "starts": ("start",),
    "ends": ("end",),
    "held": ("pairs",),
    "versions": ("number",),
    "stash": ("bytes",),
    "peaks": ("bytes",),
    "waits": ("message", "from", "to"),
    "messages": ("action", *_MESSAGE, "source", "made", "sent", "arrived", "from", "to", "bytes"),
    "sends": (*_MESSAGE, "target", "from", "to", "bytes"),
    "exchanges": ("stage", "from", "to"),
    "overheads": ("kind", "from", "to"),
    "between": ("kind", "from", "to"),
    "heard": ("source", "left", "arrived"),
}

# The kinds in these two tables: work of the executor itself during a step, and events between steps.
OVERHEADS = ("begin", "post", "note", "leave", "end", "ask")
BETWEEN = ("tell", "write", "hear", "clip", "update", "data", "evaluate", "check", "save", "move")

# Columns that hold times of the rank's own clock; files count them from the start of the step.
_MOMENTS = frozenset({"start", "end", "arrived", "from", "to"})


@dataclass(frozen=True, slots=True)
class Record:
    """One rank's step.

    The step lasts from the call of `step` until this rank only has to inform the others. `since_ns` is the end of the
    previous step, and `between` lists what happened since then. `held` and `stash` are the pairs and bytes held after
    each timed action. `versions` are the weights that each of them used, as the number of the stage's updates by then;
    an UPDATE's is the one that it makes. Only steps without a flush have them. `peaks` are the most bytes held while it
    ran: after a recomputation, or between the halves of an overlapped pair. Bytes exist only if they were
    weighed. A message names the timed action that needed it. `made` and
    `sent` use the source's clock; the message could be used once it had `arrived`, and was copied between `from` and
    `to`. Clocks with the same number show the same time. With several clocks, `heard` holds the fastest packet from
    every other rank since the last step: when it left, by that rank's clock, and when it arrived.
    """

    rank: int
    step: int = 0
    since_ns: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    clock: int = 0
    on_device: int = 0  # whether starts and ends are those of a device, which the host may have run ahead of
    program: int = 0  # number of the run's program that the step used
    starts: Sequence[int] = field(default_factory=list)
    ends: Sequence[int] = field(default_factory=list)
    held: Sequence[int] = field(default_factory=list)
    versions: Sequence[int] = field(default_factory=list)
    stash: Sequence[int] = field(default_factory=list)
    peaks: Sequence[int] = field(default_factory=list)
    waits: Sequence[int] = field(default_factory=list)
    messages: Sequence[int] = field(default_factory=list)
    sends: Sequence[int] = field(default_factory=list)
    exchanges: Sequence[int] = field(default_factory=list)
    overheads: Sequence[int] = field(default_factory=list)
    between: Sequence[int] = field(default_factory=list)
    heard: Sequence[int] = field(default_factory=list)

    @property
    def is_weighed(self) -> bool:
        """Whether bytes were recorded, both during and after every action."""
        return 0 < len(self.starts) == len(self.stash) == len(self.peaks)

    def rows(self, table: str) -> Iterator[Sequence[int]]:
        """Yield the rows of a table.

        >>> list(Record(0, exchanges=[2, 100, 300, 3, 200, 400]).rows("exchanges"))
        [[2, 100, 300], [3, 200, 400]]
        """
        flat, width = getattr(self, table), len(COLUMNS[table])
        return (flat[at : at + width] for at in range(0, len(flat), width))

    def column(self, table: str, name: str) -> Sequence[int]:
        """Return one column of a table.

        >>> Record(0, exchanges=[2, 100, 300, 3, 200, 400]).column("exchanges", "to")
        [300, 400]
        """
        columns = COLUMNS[table]
        column: Sequence[int] = getattr(self, table)[columns.index(name) :: len(columns)]
        return column

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object: own times count from the start of the step, empty tables are left out.

        >>> Record(0, begin_ns=1000, end_ns=1500, starts=[1100], ends=[1300]).to_json()
        {'rank': 0, 'step': 0, 'since_ns': -1000, 'begin_ns': 1000, 'end_ns': 500, ... 'starts': [100], 'ends': [300]}
        """
        plain = {name: getattr(self, name) for name in _PLAIN if name != "program" or self.program}
        plain["since_ns"] -= self.begin_ns
        plain["end_ns"] -= self.begin_ns
        tables = ((name, getattr(self, name)) for name in COLUMNS)
        return plain | {name: _shifted(name, flat, -self.begin_ns) for name, flat in tables if flat}

    @staticmethod
    def from_json(table: Mapping[str, Any]) -> Record:
        """Read a record from the object that `to_json` returned.

        >>> record = Record(1, begin_ns=1000, end_ns=1500, exchanges=[2, 1100, 1300])
        >>> Record.from_json(record.to_json()) == record
        True
        """
        begin = int(table["begin_ns"])
        values: dict[str, Any] = {name: int(table[name]) for name in _PLAIN if name != "program" or name in table}
        values["since_ns"] += begin
        values["end_ns"] += begin
        values |= {name: _shifted(name, table.get(name, ()), begin) for name in COLUMNS}
        return Record(**values)


_PLAIN = tuple(entry.name for entry in fields(Record) if entry.name not in COLUMNS)


def _shifted(table: str, flat: Sequence[int], by: int) -> list[int]:
    """Return a table with its own times shifted."""
    moved, columns = list(flat), COLUMNS[table]
    for at, name in enumerate(columns):
        if name in _MOMENTS:
            moved[at :: len(columns)] = [moment + by for moment in moved[at :: len(columns)]]
    return moved


@cache
def coded(receive: Action) -> tuple[int, int, int]:
    """Return the three columns that name a message.

    >>> coded(Action.parse("2RECV_B5"))
    (2, 1, 5)
    """
    return receive.stage, RECEIVES.index(receive.op), -1 if receive.microbatch is None else receive.microbatch


def decoded(stage: int, op: int, microbatch: int) -> Action:
    """Return the receive that three columns name.

    >>> decoded(2, 1, 5)
    2RECV_B5
    """
    return Action(stage, RECEIVES[op], None if microbatch < 0 else microbatch)


LINE = FileKind("record", RecordError, "the line as the run wrote it", 256 * 2**20)

MOST_PROGRAMS = 10**6
_MOMENT = 2**61  # nanoseconds, 73 years: the sum of two still fits in 64 bits
_ANY_MOMENTS = ("start", "end", "from", "to", "made", "sent", "arrived", "left")
_PER_ACTION = ("starts", "ends", "held", "versions", "stash", "peaks")


def read_record(line: Mapping[str, Any], program: Program, rank: int, step: int) -> Record:
    r"""Read the record in a line, which must be for this rank and step.

    >>> program = Program.parse("0F0,0B0")
    >>> line = Record(0, 3, starts=[100, 200], ends=[150, 300], held=[1, 0]).to_json()
    >>> read_record(line, program, 0, 3).ends
    [150, 300]
    >>> read_record(line | {"ends": [150]}, program, 0, 3)
    Traceback (most recent call last):
    drumline.core.errors.RecordError: a damaged record: ends has 1 number; expected one for each of 2 timed actions
    """
    table = Parsed(dict(line), LINE)
    for name, least in (("since_ns", -_MOMENT), ("begin_ns", -_MOMENT), ("end_ns", 0)):
        table[name].whole(least, _MOMENT)
    for name, number in (("rank", rank), ("step", step)):
        if table[name].value != number:
            raise table[name].refuse(str(number))
    table["clock"].whole(-(2**63), 2**64)
    if table["on_device"].value not in (0, 1):
        raise table["on_device"].refuse("0 or 1")
    if "program" in line:
        table["program"].whole(0, MOST_PROGRAMS)
    num_timed = len(program.timed_rows[rank])
    tables = {name: _flat(table, name) for name in COLUMNS}
    for name in _PER_ACTION:
        _check_length(name, tables[name], tables["starts"], num_timed)
    for at, (start, end) in enumerate(zip(tables["starts"], tables["ends"], strict=True)):
        if end < start:
            raise LINE.refuse(f"a damaged record: action {at} ends {start - end} ns before it starts")
    counts = {
        "action": num_timed + 1,  # one past the last action, for the gradient exchange
        "message": len(tables["messages"]) // len(COLUMNS["messages"]),
        "source": program.num_ranks,
        "target": program.num_ranks,
        "stage": program.num_stages,
        "op": len(RECEIVES),
    }
    for name, flat in tables.items():
        _check_columns(name, flat, counts)
    for name, first in (("messages", 1), ("sends", 0)):
        _check_messages(name, tables[name], first, program)
    return Record.from_json({**line, **tables})


def _flat(table: Parsed, name: str) -> Sequence[int]:
    """Return a table's numbers: whole, 64-bit, and complete rows."""
    content = table.get(name)
    if content is None:
        return []
    width = len(COLUMNS[name])
    if not isinstance(content.value, list) or len(content.value) % width:
        raise content.refuse(f"a list of whole numbers, {width} per row")
    try:
        return array("q", content.value).tolist()
    except (TypeError, OverflowError):
        raise content.refuse("whole numbers of at most 64 bits") from None


def _check_length(name: str, flat: Sequence[int], starts: Sequence[int], num_timed: int) -> None:
    allowed = (len(starts),) if name == "ends" else (0, num_timed)
    if len(flat) not in allowed:
        has = counted(len(flat), "number")
        raise RecordError(f"a damaged record: {name} has {has}", expected=f"one for each of {num_timed} timed actions")


def _check_columns(table: str, flat: Sequence[int], counts: Mapping[str, int]) -> None:
    """Reject bad indices, impossible times, and negative sizes."""
    if not flat:
        return
    kinds = {"overheads": len(OVERHEADS), "between": len(BETWEEN)}
    for at, name in enumerate(COLUMNS[table]):
        column = flat[at :: len(COLUMNS[table])]
        least, most = 0, 2**62
        if name in _ANY_MOMENTS:
            least, most = -_MOMENT, _MOMENT
        elif name == "kind":
            most = kinds[table] - 1
        elif name == "microbatch":
            least = -1
        elif name in counts:
            most = counts[name] - 1
        if not least <= min(column) <= max(column) <= most:
            odd = next(number for number in column if not least <= number <= most)
            raise RecordError(
                f"a damaged record: {name} of {table} is {odd}", expected=f"a whole number from {least} to {most}"
            )


def _check_messages(table: str, flat: Sequence[int], first: int, program: Program) -> None:
    """Reject messages that the program does not send."""
    known = _receives(program)
    width = len(COLUMNS[table])
    for entry in set(zip(*(flat[first + at :: width] for at in range(3)), strict=True)):
        if entry not in known:
            raise LINE.refuse(f"a damaged record: {table} contains {decoded(*entry)}, which the program does not send")


@once_per_program
def _receives(program: Program) -> set[tuple[int, ...]]:
    """Return every message of a program as columns: what stages send, and the gradients they exchange."""
    # A step without a flush takes messages that an earlier step has sent.
    needed = [entry[0] for action in program.work() for entry in rules.needs(action, program.num_stages)]
    sent = (rules.message(action, program.num_stages) for action in (*program.work(), *needed))
    exchanged = RECEIVES.index(Op.REDUCE_GRAD)
    received: set[tuple[int, ...]] = {coded(message.recv) for message in sent if message is not None}
    return received | {(stage, exchanged, -1) for stage in range(program.num_stages)}
