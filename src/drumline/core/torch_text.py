"""Programs for PyTorch's own pipelining: the CSV that its `_load_csv` reads, and torchtitan's matching settings."""

from __future__ import annotations

from drumline.core.action import Op
from drumline.core.errors import InvalidProgram, ProgramError
from drumline.core.lower import lower
from drumline.core.program import Program
from drumline.core.validate import validate

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
    rows = program.rows if communication and program.has_communication else program.compute_only().rows
    plain = Program(tuple(tuple(a for a in row if a.op is not Op.REDUCE_GRAD) for row in rows), program.name)
    return (lower(plain) if communication else plain).format() + "\n"


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
    return ""
