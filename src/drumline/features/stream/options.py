"""Options of a pipeline whose schedule has no flush: what does not go with it, and its endless rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import ProgramError, UsageError
from drumline.core.program import Program
from drumline.engine.options import SWITCH, FeatureOptions, option
from drumline.features.stream.rows import StreamRows
from drumline.model.weights.tied import Ties
from drumline.schedules import find


@dataclass(frozen=True, kw_only=True)
class StreamOptions(FeatureOptions):
    """`vertical_sync`: with "pipedream", let all ranks use the weights that rank 0 uses, as of the same update."""

    vertical_sync: bool = option(False, SWITCH)

    def schedule_settings(self) -> dict[str, Any]:
        """Let the schedule have no flush."""
        return super().schedule_settings() | {"streams": True, "vertical_sync": self.vertical_sync}

    def check_program(self, program: Program, others: Mapping[str, Any]) -> None:
        """Refuse what does not go together with a schedule without a flush."""
        super().check_program(program, others)
        if program.num_updates:
            _check_options(others, program)


def _check_options(given: Mapping[str, Any], program: Program) -> None:
    """Refuse what does not go together with a schedule without a flush; `given` are all options by name."""
    wrong = {
        "capture": "CUDA graphs of whole steps",
        "compile": "compiled stages: compiled code may keep weights of its own for the backward",
        "programs": "several programs",
        "mesh": "several lines",
        "arrange": "another order of microbatches",
        "adapt": "programs and cuts that change while it runs",
    }
    for name, what in wrong.items():
        if value := given.get(name):
            raise UsageError(
                f"{name} is {value if isinstance(value, bool) else 'set'} and {program.name} has no flush",
                expected=f"a flushed schedule for {what}",
                fix="use 1f1b, or leave it out",
            )
    if given.get("precision") == "fp16":
        raise UsageError(
            f"precision is 'fp16' and {program.name} has no flush",
            expected='"fp32" or "bf16": all ranks would have to agree on a loss scale before every update',
        )
    if not isinstance(given["schedule"], str) or given["schedule"].endswith(".csv"):
        raise ProgramError(
            f"program {program.name!r} updates weights while it runs",
            expected="the name of its schedule, so that its rows can go on for ever",
            fix=f"pass schedule={program.name!r}",
        )


def rows_of(name: str, options: StreamOptions, program: Program, pruned: Callable[[Program], Program]) -> StreamRows:
    """Return the endless rows of a named schedule; `pruned` takes out backwards of frozen stages."""
    schedule, count, ranks = find(name), program.num_microbatches, program.num_ranks
    chosen = {"vertical_sync": True} if options.vertical_sync else {}

    def build(steps: int) -> Program:
        if "num_steps" in schedule.options:
            return pruned(schedule.build(ranks, count, num_steps=steps, **chosen))
        return pruned(schedule.build(ranks, count * steps, **chosen))

    return StreamRows.of(build, count)


def check_ties(ties: Ties, schedule: str, options: StreamOptions, *, alone: bool) -> None:
    """Refuse tied parameters of which all ranks would not use the same version."""
    shared = next((one for one in ties.tensors if one.is_copied and one.is_parameter), None)
    if shared is None:
        return
    what = f"{' and '.join(shared.names)} are one tensor on ranks {' and '.join(map(str, shared.ranks))}"
    if alone:
        raise UsageError(
            f"{what}, which take turns in this process", expected=f"with {schedule}, a process for every rank"
        )
    if not is_synchronous(schedule, options):
        raise UsageError(
            f"{what}, which {schedule} updates at different times",
            expected="an update at the same place in all rows",
            fix="pass vertical_sync=True",
        )


def is_synchronous(schedule: str, options: StreamOptions) -> bool:
    """Whether an update comes at the same place in the rows of all ranks."""
    return options.vertical_sync or "vertical_sync" not in find(schedule).options
