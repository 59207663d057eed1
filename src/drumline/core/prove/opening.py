r"""The opening of a step: the forwards that every rank can run and then take back, as if they had never run.

    rank 0   0F0 0SEND_F0 0F1 ┊ 0SEND_F1 0F2 0SEND_F2 ...     the opening of each row ends at ┊
    rank 1   1F0 ┊ 1B0 1SEND_B0 1F1 ...

Nothing in it makes a gradient, and what a rank sends in its opening another uses in its own. So after all openings no
message is under way, and the step can begin again. Receives that are posted early, for messages from after the
opening, are posted at its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from drumline.core import rules
from drumline.core.action import RECV_OPS, Action, Op
from drumline.core.program import Program, Row, once_per_program

_OPENS = frozenset({Op.FORWARD, Op.SEND_F}) | RECV_OPS


@once_per_program
def openings(program: Program) -> tuple[tuple[Row, Row], ...]:
    r"""Return every row of a lowered program in two parts, the opening and the rest.

    >>> from drumline.core.lower.lower import lower
    >>> for opening, rest in openings(lower(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))):
    ...     print(*opening, "┊", *rest)
    0F0 0SEND_F0 0F1 ┊ 0RECV_B0 0RECV_B1 0SEND_F1 0B0 0B1
    1RECV_F0 1F0 ┊ 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1
    """
    rows = program.rows
    ends = [next((at for at, action in enumerate(row) if action.op not in _OPENS), len(row)) for row in rows]
    while True:
        sent = {rules.message_of(action).recv for action in _until(rows, ends) if action.op is Op.SEND_F}
        used = {Action(act.stage, Op.RECV_F, act.microbatch) for act in _until(rows, ends) if act.op is Op.FORWARD}
        shorter = [_shortened(program, rank, end, sent, used) for rank, end in enumerate(ends)]
        if shorter == ends:
            return tuple(_parted(row[:end], row[end:]) for row, end in zip(rows, ends, strict=True))
        ends = shorter


def _until(rows: Sequence[Row], ends: Sequence[int]) -> Iterator[Action]:
    for row, end in zip(rows, ends, strict=True):
        yield from row[:end]


def _shortened(program: Program, rank: int, end: int, sent: Set[Action], used: Set[Action]) -> int:
    """Return where a rank's opening ends if others send and use no more in theirs."""
    for at, row in enumerate(program.rows[rank][:end]):
        if row.op is Op.FORWARD and row.stage > 0:
            assert row.microbatch is not None
            is_local = program.placement.rank_of(row.stage - 1, row.microbatch) == rank
            if not is_local and Action(row.stage, Op.RECV_F, row.microbatch) not in sent:
                return at
        if row.op is Op.SEND_F and rules.message_of(row).recv not in used:
            return at
    return end


def _parted(opening: Row, rest: Row) -> tuple[Row, Row]:
    """Return both parts, with the receives that only the second uses moved there."""
    used = {Action(action.stage, Op.RECV_F, action.microbatch) for action in opening if action.op is Op.FORWARD}
    early = dict.fromkeys(action for action in opening if action.op in RECV_OPS and action not in used)
    return tuple(action for action in opening if action not in early), (*early, *rest)
