"""The proof of legal programs on arrays, by the compiled kernel: messages, copies, exchanges and frozen stages too.

    Is every action there once, on its rank, in its order?        then run the rows: does each reach its end?

It says yes, or nothing. What is not surely legal goes to the checks that name every violation; they share no code with
it. Without a kernel they prove everything else, too.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.core import rules
from drumline.core.action import AWAITED, RECV_OPS, SEND_OPS, Op
from drumline.core.channel import Queues
from drumline.core.graph import OPS
from drumline.core.kernel.library import Kernel, kernel
from drumline.core.placement import Placement
from drumline.core.program import Program, once_per_program
from drumline.core.rules import Backward

_Int32s = npt.NDArray[np.int32]
_Bytes = npt.NDArray[np.uint8]
_COMPUTES, _KINDS, _CHANNELS = tuple(rules.NEEDS), tuple(Backward), tuple(Queues)
# The roles of ops, numbered as in the kernel; an overlapped pair has none, only its halves do.
_ROLES: tuple[frozenset[Op], ...] = (
    frozenset(_COMPUTES),
    SEND_OPS,
    RECV_OPS,
    frozenset(wait for wait, awaited in AWAITED.items() if awaited in SEND_OPS),
    frozenset({Op.REDUCE_GRAD}),
    frozenset({Op.WAIT_REDUCE_GRAD}),
    frozenset({Op.UPDATE}),
    frozenset({Op.UNSHARD}),
    frozenset({Op.RESHARD}),
)


class _Tables(NamedTuple):
    """The rules as numbers: a row per op, what compute ops need, which sets of them are complete, and pairs."""

    ops: _Int32s
    num_columns: int
    needs: _Int32s
    ways: _Bytes
    halves: _Int32s


def _tables() -> _Tables:
    return _tables_of(tuple(rules.NEEDS.values()))


@cache
def _tables_of(needed_by: tuple[tuple[rules.Need, ...], ...]) -> _Tables:
    columns = [*_COMPUTES, *(op for op in OPS if op in SEND_OPS | RECV_OPS | _ROLES[3])]
    column = {op: number for number, op in enumerate(columns)}
    rows = []
    for op in OPS:
        role = next((number for number, ops in enumerate(_ROLES) if op in ops), -1)
        sent, received = (column[end] for end in rules.SPELLED[op]) if op in rules.SPELLED else (-1, -1)
        if op in _ROLES[3]:
            sent = column[AWAITED[op]]
        rows.append([role, column.get(op, -1), sent, received, op in rules.RELEASES])
    needs: list[int] = []
    for needed in needed_by:
        needs.append(len(needed))
        for need in needed:
            needs += [need.stage_offset, len(need.ops), *(column[op] for op in need.ops)]
    ways = np.zeros((len(_KINDS), 2 ** len(_COMPUTES)), dtype=np.uint8)
    for kind, sets in rules.WAYS.items():
        ways[_KINDS.index(kind), [sum(1 << column[op] for op in way) for way in sets]] = 1
    halves = [column[op] for op in rules.OVERLAPPED]
    return _Tables(_whole(rows), len(columns), _whole(needs), ways, _whole(halves))


def _whole(numbers: npt.ArrayLike) -> _Int32s:
    return np.ascontiguousarray(numbers, dtype=np.int32)


@once_per_program
def surely_legal(program: Program, placement: Placement | None, channel: Queues) -> bool:
    r"""Whether the kernel proves a program legal on a channel; otherwise it may be or not.

    Without a `placement`, it is the one that all rows agree with.

    >>> text = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0"
    >>> surely_legal(Program.parse(text), None, Queues.RANK) in (True, kernel() is not None)
    True
    """
    library, columns = kernel(), program.columns
    stages, microbatches, count = program.num_stages, program.num_units, len(columns.code)
    if library is None or not 0 < stages * microbatches <= count < 2**31:
        return False
    home, mirrored = np.empty(stages, dtype=np.int32), np.zeros(microbatches, dtype=np.uint8)
    if placement is not None:
        if (placement.num_ranks, placement.num_stages) != (columns.num_ranks, stages):
            return False
        home[:] = placement.homes
        mirrored[[number for number in placement.mirrored if number < microbatches]] = 1
    kind = np.array([_KINDS.index(each) for each in program.backwards], dtype=np.uint8)
    tables = _tables()
    entries = (columns.stage, columns.code, columns.microbatch, columns.rank, columns.cell)
    if any(entry.dtype.itemsize > 4 for entry in entries):  # numbers that the kernel would take for others
        return False
    paired = np.ascontiguousarray(columns.paired, dtype=np.uint8)
    answer = library.legal(
        count,
        *map(_whole, entries),
        paired,
        *(columns.num_ranks, stages, microbatches),
        *(home, mirrored, placement is None),
        *(len(OPS), tables.ops, tables.num_columns, len(_COMPUTES)),
        *(tables.needs, kind, tables.ways, tables.halves),
        _CHANNELS.index(channel),
    )
    if answer == Kernel.OUT_OF_MEMORY:
        raise MemoryError(f"no memory to prove {count} actions")
    return answer == 0
