"""A line of a run's file as a record, having refused what no run wrote: every column by its name.

A record indexes its program, its messages and the other ranks; what points nowhere would fail much later.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.core import rules
from drumline.core.action import TIMED_OPS, Op
from drumline.core.errors import RecordError
from drumline.core.files import Kind
from drumline.core.measured.record import BETWEEN, COLUMNS, OVERHEADS, RECEIVES, Record, coded, decoded
from drumline.core.parsed import Parsed
from drumline.core.program import Program, once_per_program

LINE = Kind("record", RecordError, "the line as the run wrote it", 256 * 2**20)

_MOMENT = 2**61  # nanoseconds, 73 years: sums of two still fit 64 bits
_MOMENTS = ("start", "end", "from", "to", "made", "sent", "arrived", "left")
_PER_ACTION = ("starts", "ends", "held", "stash", "peaks")


def read_record(line: Mapping[str, Any], program: Program, rank: int, step: int) -> Record:
    r"""Return the record of a line, which is of this rank and step.

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
    num_timed = sum(action.op in TIMED_OPS for action in program.rows[rank])
    tables = {name: _flat(table, name) for name in COLUMNS}
    for name in _PER_ACTION:
        _check_length(name, tables[name], tables["starts"], num_timed)
    for at, (start, end) in enumerate(zip(tables["starts"], tables["ends"], strict=True)):
        if end < start:
            raise LINE.refuse(f"a damaged record: action {at} ends {start - end} ns before it starts")
    counts = {
        "action": num_timed + 1,  # behind the last one, where gradients are exchanged
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
    """Return a table's numbers, whole and of 64 bits, in whole rows."""
    found = table.get(name)
    if found is None:
        return []
    width = len(COLUMNS[name])
    if not isinstance(found.value, list) or len(found.value) % width:
        raise found.refuse(f"a list of whole numbers, {width} in a row")
    try:
        return array("q", found.value).tolist()
    except (TypeError, OverflowError):
        raise found.refuse("whole numbers of 64 bits") from None


def _check_length(name: str, flat: Sequence[int], starts: Sequence[int], num_timed: int) -> None:
    allowed = (len(starts),) if name == "ends" else (0, num_timed)
    if len(flat) not in allowed:
        many = "number" if len(flat) == 1 else "numbers"
        raise RecordError(
            f"a damaged record: {name} has {len(flat)} {many}", expected=f"one for each of {num_timed} timed actions"
        )


def _check_columns(table: str, flat: Sequence[int], counts: Mapping[str, int]) -> None:
    """Refuse indices that point nowhere, times out of all bounds, and negative sizes."""
    if not flat:
        return
    kinds = {"overheads": len(OVERHEADS), "between": len(BETWEEN)}
    for at, name in enumerate(COLUMNS[table]):
        column = flat[at :: len(COLUMNS[table])]
        least, most = 0, 2**62
        if name in _MOMENTS:
            least, most = -_MOMENT, _MOMENT
        elif name == "kind":
            most = kinds[table] - 1
        elif name == "microbatch":
            least = -1
        elif name in counts:
            most = counts[name] - 1
        if not least <= min(column) <= max(column) <= most:
            odd = next(one for one in column if not least <= one <= most)
            raise RecordError(
                f"a damaged record: {name} of {table} is {odd}", expected=f"a whole number from {least} to {most}"
            )


def _check_messages(table: str, flat: Sequence[int], first: int, program: Program) -> None:
    """Refuse messages that the program does not send."""
    known = _receives(program)
    width = len(COLUMNS[table])
    for one in set(zip(*(flat[first + at :: width] for at in range(3)), strict=True)):
        if one not in known:
            raise LINE.refuse(f"a damaged record: {table} has {decoded(*one)}, which the program does not send")


@once_per_program
def _receives(program: Program) -> set[tuple[int, ...]]:
    """Return every message of a program, as columns: what stages hand on, and gradients that are exchanged."""
    sent = (rules.message(action, program.num_stages) for action in program.work())
    exchanged = RECEIVES.index(Op.REDUCE_GRAD)
    received: set[tuple[int, ...]] = {coded(message.recv) for message in sent if message is not None}
    return received | {(stage, exchanged, -1) for stage in range(program.num_stages)}
