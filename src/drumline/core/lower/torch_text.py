"""Export programs to PyTorch's pipelining: the CSV that its `_load_csv` reads, and matching torchtitan settings."""

from __future__ import annotations

import re

from drumline.core.action import SEND_OPS, WAIT_OPS, Action, Op
from drumline.core.channel import STRICTEST
from drumline.core.errors import ProgramError
from drumline.core.lower.lower import lower
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.frozen import untrained
from drumline.core.prove.messages import wait_for
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.state_actions import with_state

_TITAN_BY_PLACEMENT = {"linear": "1F1B", "loop": "Interleaved1F1B", "v": "ZBVZeroBubble"}


# From this version on, PyTorch requires a WAIT for every send and REDUCE_GRAD of a lowered file; before, it knows none.
_FIRST_WITH_WAITS = (2, 15)
OLDER, NEWER = "2.13", "2.15"  # the newest version before that, and the first version with it


def for_torch(program: Program, *, communication: bool = False, version: str = OLDER) -> str:
    r"""Return the text that PyTorch loads as "compute_only", or with `communication` as "compute_comms".

    A compute-only text is the same for all versions. With communication, the text for torch 2.15 or newer (`version`)
    contains WAITs. Raises ProgramError with the reason if PyTorch cannot run the program. It also raises if the
    program's own sends and receives would hang on a channel with one queue per rank, which PyTorch may use.

    >>> print(for_torch(Program.parse("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")), end="")
    0F0,0B0
    1F0,1B0
    """
    waits = _wants_waits(version)
    if violations := validate(program):
        raise InvalidProgram(program.name, violations)
    if program.num_slices > 1:
        raise ProgramError(
            f"PyTorch cannot run {program.name!r}: it runs microbatches in slices, and PyTorch's files have none",
            expected="microbatches in one piece",
            fix="run slices with Drumline, or leave them out",
        )
    if reason := _refusal(program):
        raise ProgramError(
            f"PyTorch cannot run {program.name!r}: {reason}", expected="one rank per stage, one step, with backwards"
        )
    if communication:
        return _proven(program, waits=waits).format() + "\n"
    return program.compute_only().without({Op.REDUCE_GRAD}).format() + "\n"


def _wants_waits(version: str) -> bool:
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?!\d)", version)
    if match is None:
        raise ProgramError(f"{version!r:.40} is not a PyTorch version", expected=f"one like {OLDER} or {NEWER}")
    return (int(match[1]), int(match[2])) >= _FIRST_WITH_WAITS


def _proven(program: Program, *, waits: bool) -> Program:
    """Return the program as PyTorch runs it with communication, proven on the strictest channel it may use."""
    if program.has_communication and (hangs := validate(program, channel=STRICTEST)):
        raise ProgramError(
            f"the sends and receives of {program.name!r} would hang in PyTorch: {hangs[0]}",
            expected="an order that is safe with one message queue per rank, as PyTorch uses over NCCL",
            fix="leave them out (--format torch; program.compute_only()), and a safe order is chosen automatically",
        )
    complete = with_state(lower(program, channel=STRICTEST).without(WAIT_OPS))
    if waits:
        complete = _with_waits(complete)
    if violations := validate(complete, channel=STRICTEST):
        raise InvalidProgram(program.name, violations)
    return complete


def _with_waits(program: Program) -> Program:
    """Return the program with a WAIT for every send and gradient exchange, where none makes a rank wait longer.

    When the gradient for an activation comes back, its send is long complete: its WAIT follows that backward. Nothing
    comes back for a gradient: its WAIT is at the end. A rank waits for an exchange before its next exchange.
    """
    rows = []
    for row in program.rows:
        waiting: list[Action] = []
        completed: list[Action] = []
        for action in row:
            answered = {_answered(part) for part in action.work}
            before = [other for other in waiting if other.op is Op.WAIT_REDUCE_GRAD and action.op is Op.REDUCE_GRAD]
            behind = [other for other in waiting if other in answered]
            completed += [*before, action, *behind]
            waiting = [other for other in waiting if other not in before + behind]
            if action.op in SEND_OPS or action.op is Op.REDUCE_GRAD:
                waiting.append(wait_for(action))
        rows.append((*completed, *waiting))
    return program.rearranged(rows)


def _answered(part: Action) -> Action | None:
    """Return the WAIT for the send that a backward's gradient answers."""
    return part._replace(op=Op.WAIT_SEND_F) if part.op in (Op.BACKWARD, Op.BACKWARD_INPUT) else None


def titan_schedule(program: Program) -> str:
    r"""Return the torchtitan `pipeline_parallel_schedule` that places stages like this program.

    torchtitan takes the order from the CSV (`pipeline_parallel_schedule_csv`) and the placement from this name.

    >>> titan_schedule(Program.parse("0F0,0B0\n1F0,1B0"))
    '1F1B'
    """
    titan = titan_by_placement(program.placement)
    if titan is None:
        raise ProgramError(
            f"torchtitan has no schedule with the placement of {program.name!r}",
            expected="a linear or loop placement, or a V of two stages per rank",
        )
    return titan


def titan_by_placement(placement: Placement) -> str | None:
    """Return the torchtitan schedule that places stages this way, or None if it has none.

    >>> titan_by_placement(Placement.v(4))
    'ZBVZeroBubble'
    """
    if placement.name == "v" and placement.num_stages != 2 * placement.num_ranks:
        return None
    return _TITAN_BY_PLACEMENT.get(placement.name)


def _refusal(program: Program) -> str:
    if program.placement.mirrored:
        return "it holds each stage on two ranks"
    if program.num_updates:
        return "it spans several optimizer steps (UPDATE)"
    if not program.has_backward:
        return "it has no backward"
    if frozen := list(untrained(program)):
        return f"it has {' and '.join(frozen)}, but PyTorch still sends gradients and expects weight gradients"
    return ""
