"""Options of a pipeline whose schedule has no flush, and its endless rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import UsageError
from drumline.core.program import Program
from drumline.engine.options import SWITCH, FeatureOptions, option
from drumline.features.stream.rows import StreamRows
from drumline.features.stream.together import is_synchronous
from drumline.model.weights.tied import Ties
from drumline.schedules import find


@dataclass(frozen=True, kw_only=True)
class StreamOptions(FeatureOptions):
    """`vertical_sync`: with "pipedream", let all ranks use the weights that rank 0 uses, as of the same update."""

    vertical_sync: bool = option(False, SWITCH)

    def schedule_settings(self) -> dict[str, Any]:
        """Let the schedule have no flush."""
        return super().schedule_settings() | {"streams": True, "vertical_sync": self.vertical_sync}


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
    shared = next((tensor for tensor in ties.tensors if tensor.is_copied and tensor.is_parameter), None)
    if shared is None:
        return
    what = f"{' and '.join(shared.names)} are one tensor on ranks {' and '.join(map(str, shared.ranks))}"
    if alone:
        raise UsageError(
            f"{what}, which take turns in this process", expected=f"with {schedule}, a process for every rank"
        )
    if not is_synchronous(schedule, vertical_sync=options.vertical_sync):
        raise UsageError(
            f"{what}, which {schedule} updates at different times",
            expected="an update at the same place in all rows",
            fix="pass vertical_sync=True",
        )
