"""Programs for PyTorch's own pipelining: the CSV that its `_load_csv` reads, and torchtitan's matching settings."""

from __future__ import annotations

from drumline.core import rules
from drumline.core.action import STATE_OPS, Action, Op
from drumline.core.errors import ProgramError
from drumline.core.frozen import untrained
from drumline.core.lower import lower
from drumline.core.program import Program
from drumline.core.validate import validate
from drumline.core.violation import InvalidProgram

_TITAN_BY_PLACEMENT = {"linear": "1F1B", "loop": "Interleaved1F1B", "v": "ZBVZeroBubble"}


def for_torch(program: Program, *, communication: bool = False) -> str:
    r"""Return the text that PyTorch loads as "compute_only", or with `communication` as "compute_comms".

    What PyTorch cannot run is refused with the reason.

    >>> print(for_torch(Program.parse("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0")), end="")
    0F0,0B0
    1F0,1B0
    """
    if violations := validate(program):
        raise InvalidProgram(program.name, violations)
    if reason := _refusal(program):
        raise ProgramError(
            f"PyTorch cannot run {program.name!r}: {reason}",
            expected="one rank per stage, one step, with backwards",
        )
    if communication:
        return _with_state(lower(program)).format() + "\n"
    rows = program.compute_only().rows
    plain = Program(tuple(tuple(a for a in row if a.op is not Op.REDUCE_GRAD) for row in rows), program.name)
    return plain.format() + "\n"


def _with_state(program: Program) -> Program:
    """Return the program with what PyTorch adds to a compute-only file itself, where it is not spelled out already.

    A stage is gathered before its first compute and released behind its last; behind its last backward its gradients
    are scaled and reduced, without which they would be M times too large.
    """
    rows = []
    for row in program.rows:
        said = {(action.stage, action.op) for action in row if action.op in STATE_OPS}
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        last_backward: dict[int, int] = {}
        for at, action in enumerate(row):
            for part in action.work if action.is_compute else ():
                first.setdefault(part.stage, at)
                last[part.stage] = at
                if part.op in rules.RELEASES:
                    last_backward[part.stage] = at
        completed: list[Action] = []
        for at, action in enumerate(row):
            completed += [Action(s, Op.UNSHARD) for s in first if first[s] == at and (s, Op.UNSHARD) not in said]
            completed.append(action)
            for op, places in ((Op.REDUCE_GRAD, last_backward), (Op.RESHARD, last)):
                completed += [Action(s, op) for s in places if places[s] == at and (s, op) not in said]
        rows.append(tuple(completed))
    return Program(tuple(rows), program.name)


def titan_schedule(program: Program) -> str:
    r"""Return torchtitan's `pipeline_parallel_schedule` whose placement of stages is this program's.

    torchtitan takes the order from the CSV (`pipeline_parallel_schedule_csv`) and the placement from this name.

    >>> titan_schedule(Program.parse("0F0,0B0\n1F0,1B0"))
    '1F1B'
    """
    placement = program.placement
    if placement.name not in _TITAN_BY_PLACEMENT or (
        placement.name == "v" and placement.num_stages != 2 * placement.num_ranks
    ):
        raise ProgramError(
            f"torchtitan has no schedule with the placement of {program.name!r}",
            expected="a linear or loop placement, or a V of two stages per rank",
        )
    return _TITAN_BY_PLACEMENT[placement.name]


def _refusal(program: Program) -> str:
    if program.placement.mirrored:
        return "it holds each stage on two ranks"
    if program.num_updates:
        return "it spans several optimizer steps (UPDATE)"
    if not program.has_backward:
        return "it has no backwards"
    if frozen := list(untrained(program)):
        return f"it has {' and '.join(frozen)}, where PyTorch still sends gradients and expects weight gradients"
    return ""
