"""What may be decided before anything is planned, and what there is to choose from."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.layout import RECOMPUTE
from drumline.schedules import schedules

ZERO = (0, 1, 2, 3)


def tried_schedules() -> dict[str, tuple[int, ...]]:
    """Return, by name, with how many stages per rank schedules are tried.

    >>> tried_schedules()["zb-v"]
    (2,)
    """
    return {name: one.planned_with for name, one in schedules().items() if one.planned_with}


@dataclass(frozen=True, slots=True)
class Pins:
    """What is decided already; None leaves a choice to the planner."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    expert: int | None = None
    microbatch: int | None = None
    stages_per_rank: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    schedules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        counts = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "stages_per_rank")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is pinned to {value}", expected="a whole number of 1 or more")
        if self.zero is not None and self.zero not in ZERO:
            raise PlanError(f"zero is pinned to {self.zero}", expected="0, 1, 2 or 3")
        if self.recompute is not None and self.recompute not in RECOMPUTE:
            raise PlanError(f"recompute is pinned to {self.recompute!r}", fix=nearest(self.recompute, RECOMPUTE))
        for name in self.schedules:
            if name not in tried_schedules():
                raise PlanError(f"schedule is pinned to {name!r}", fix=nearest(name, tried_schedules()))
