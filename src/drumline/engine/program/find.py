"""Find the programs to run: one for training, one for inference."""

from __future__ import annotations

from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

from drumline.core.action import WAIT_OPS, Op
from drumline.core.errors import ProgramError, counted
from drumline.core.program import Program
from drumline.schedules import find, generate


def program_for(
    schedule: str | Path | Program,
    *,
    num_ranks: int,
    num_microbatches: int | None,
    stages_per_rank: int | None = None,
    streams: bool = False,
    vertical_sync: bool = False,
    slices: int = 1,
) -> Program:
    """Return the program that `schedule` means on these ranks, and check that the executor can run it.

    With `streams`, it may be one step of a schedule without a flush. With `slices`, every microbatch runs in so many.

    >>> program_for("1f1b", num_ranks=2, num_microbatches=4).num_microbatches
    4
    """
    if isinstance(schedule, Program):
        program = schedule
    elif isinstance(schedule, Path) or schedule.endswith(".csv"):
        program = Program.load(schedule)
    else:
        if num_microbatches is None:
            raise ProgramError("num_microbatches is missing", expected="the number of microbatches per batch")
        options: dict[str, Any] = {"num_steps": 1} if "num_steps" in find(schedule).options else {}
        if vertical_sync:
            options["vertical_sync"] = True
        counts: dict[str, Any] = {"num_ranks": num_ranks, "num_microbatches": num_microbatches, "slices": slices}
        program = generate(schedule, **counts, stages_per_rank=stages_per_rank, **options)
    if program.num_slices != slices:
        raise ProgramError(
            f"program {program.name!r} runs each microbatch in {counted(program.num_slices, 'slice')}",
            expected=f"{slices}, the slices you asked for",
        )
    if program.num_ranks != num_ranks:
        raise ProgramError(
            f"program {program.name!r} is for {counted(program.num_ranks, 'rank')}",
            expected=f"a program for {num_ranks}",
        )
    if program.num_updates and not streams:
        raise ProgramError(
            f"program {program.name!r} updates weights while it runs",
            expected="a flushed schedule here",
            fix="use 1f1b, the flushed form of pipedream",
        )
    if num_microbatches is not None and num_microbatches != program.num_microbatches:
        raise ProgramError(
            f"program {program.name!r} has {counted(program.num_microbatches, 'microbatch')}",
            expected=f"{num_microbatches}, the num_microbatches you passed",
        )
    if any(action.op in (Op.UNSHARD, Op.RESHARD) for row in program.rows for action in row):
        raise ProgramError(
            f"program {program.name!r} gathers and releases sharded parameters",
            expected="a program without UNSHARD and RESHARD: zero=3 adds them",
            fix="use program.compute_only(), which drops them",
        )
    if any(action.op in WAIT_OPS for row in program.rows for action in row):
        raise ProgramError(
            f"program {program.name!r} says where to wait for sends or exchanges",
            expected="a program without WAITs: the executor itself waits for sends, as late as possible",
            fix="use program.compute_only(), which drops them",
        )
    if not program.has_backward:
        raise ProgramError(
            f"program {program.name!r} has no backward passes",
            expected="a training program; for inference, call `eval_step`, which runs only the forwards of any program",
        )
    return program


def forwards_of(program: Program) -> Program:
    r"""Return only the program's forwards, in their order: this is legal because forwards wait only for forwards.

    >>> print(forwards_of(Program.parse("0F0,0B0\n1F0,1B0")))
    0F0
    1F0
    """
    rows = ((part for action in row for part in action.work if part.op is Op.FORWARD) for row in program.rows)
    return program.rearranged(rows, f"{program.name} forwards")


def edges_of(program: Program) -> list[tuple[int, int]]:
    r"""Return every directed pair of ranks between which the program sends anything, including gradient exchanges.

    >>> edges_of(Program.parse("0F0,0B0\n1F0,1B0"))
    [(0, 1), (1, 0)]
    """
    placement = program.placement
    edges = set()
    for microbatch in range(program.num_units):
        path = [placement.rank_of(stage, microbatch) for stage in range(program.num_stages)]
        edges |= {pair for at, other in pairwise(path) if at != other for pair in ((at, other), (other, at))}
    for stage in range(program.num_stages):
        edges |= set(permutations(placement.ranks_of(stage), 2))
    return sorted(edges)
