"""The cells of a row, each translated into a job: what it waits for, takes, calls and stores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from drumline.core.action import Action, Op
from drumline.runtime.stage import Stage
from drumline.runtime.step import Step


def nothing(*_: Any) -> tuple[Any, ...]:
    """Take nothing, or do nothing."""
    return ()


def absent(*_: Any) -> None:
    """Stand for the work of a stage that is on another rank."""
    raise AssertionError("the row has an action of a stage that this rank does not hold")


@dataclass(slots=True)
class Job:
    """One cell of the row, ready to run. `needs` are messages that must have arrived, with their sources.

    A computing job is `timed`: it passes the result of `take` to `call`, and `put` stores that result for others. An
    action that overlaps two others uses its parts. Other jobs use `run`. If a job `waits`, its `run` is a generator of
    what it waits for.
    """

    action: Action
    run: Callable[[Job, Step], Any] = nothing
    stage: Stage | None = None
    microbatch: int = -1
    needs: tuple[tuple[Action, int], ...] = ()
    other: int = -1  # the rank to which a message goes, or from which it comes
    timed: bool = False
    waits: bool = False
    take: Callable[[Job, Step], tuple[Any, ...]] = nothing
    call: Callable[..., Any] = nothing  # takes the microbatch and the result of `take`
    put: Callable[[Job, Step, Any], Any] = nothing
    parts: tuple[Job, ...] = ()
    together: tuple[int, ...] = ()  # microbatches whose W runs here at once


def merge(jobs: list[Job]) -> None:
    """Let the last of several adjacent W actions of one stage run all of them."""
    for (op, _), run in groupby(jobs, key=lambda job: (job.action.op, job.action.stage)):
        if op is Op.BACKWARD_WEIGHT:
            *others, last = run
            for job in others:
                job.call = nothing
            last.together = tuple(job.microbatch for job in (*others, last))
            last.call = partial(_merged, last)


def _merged(job: Job, microbatch: int) -> None:
    assert job.stage is not None
    job.stage.backward_weight_merged(job.together)
