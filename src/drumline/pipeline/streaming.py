"""Options of a pipeline whose schedule has no flush: what does not go with it, and its endless rows."""

from __future__ import annotations

from collections.abc import Callable

from drumline.core.errors import ProgramError, UsageError
from drumline.core.program import Program
from drumline.features.stream.rows import StreamRows
from drumline.model.weights.tied import Ties
from drumline.pipeline.options import Options
from drumline.schedules import find


def check_options(options: Options, program: Program) -> None:
    """Refuse what does not go together with a schedule without a flush."""
    wrong = {
        "capture": "CUDA graphs of whole steps",
        "compile": "compiled stages: compiled code may keep weights of its own for the backward",
        "programs": "several programs",
        "mesh": "several lines",
        "arrange": "another order of microbatches",
        "adapt": "programs and cuts that change while it runs",
    }
    for name, what in wrong.items():
        if value := getattr(options, name):
            raise UsageError(
                f"{name} is {value if isinstance(value, bool) else 'set'} and {program.name} has no flush",
                expected=f"a flushed schedule for {what}",
                fix="use 1f1b, or leave it out",
            )
    if options.precision == "fp16":
        raise UsageError(
            f"precision is 'fp16' and {program.name} has no flush",
            expected='"fp32" or "bf16": all ranks would have to agree on a loss scale before every update',
        )
    if not isinstance(options.schedule, str) or options.schedule.endswith(".csv"):
        raise ProgramError(
            f"program {program.name!r} updates weights while it runs",
            expected="the name of its schedule, so that its rows can go on for ever",
            fix=f"pass schedule={program.name!r}",
        )


def rows_of(options: Options, program: Program, pruned: Callable[[Program], Program]) -> StreamRows:
    """Return the endless rows of a schedule; `pruned` takes out backwards of frozen stages."""
    assert isinstance(options.schedule, str)
    schedule, count, ranks = find(options.schedule), program.num_microbatches, program.num_ranks
    chosen = {"vertical_sync": True} if options.vertical_sync else {}

    def build(steps: int) -> Program:
        if "num_steps" in schedule.options:
            return pruned(schedule.build(ranks, count, num_steps=steps, **chosen))
        return pruned(schedule.build(ranks, count * steps, **chosen))

    return StreamRows.of(build, count)


def check_ties(ties: Ties, options: Options, *, alone: bool) -> None:
    """Refuse tied parameters of which all ranks would not use the same version."""
    shared = next((one for one in ties.tensors if one.is_copied and one.is_parameter), None)
    if shared is None:
        return
    assert isinstance(options.schedule, str)
    what = f"{' and '.join(shared.names)} are one tensor on ranks {' and '.join(map(str, shared.ranks))}"
    if alone:
        raise UsageError(
            f"{what}, which take turns in this process", expected=f"with {options.schedule}, a process for every rank"
        )
    if not is_synchronous(options):
        raise UsageError(
            f"{what}, which {options.schedule} updates at different times",
            expected="an update at the same place in all rows",
            fix="pass vertical_sync=True",
        )


def is_synchronous(options: Options) -> bool:
    """Whether an update comes at the same place in the rows of all ranks."""
    assert isinstance(options.schedule, str)
    return options.vertical_sync or "vertical_sync" not in find(options.schedule).options
