"""Jobs that replace others in some steps: weighed, or with the halves of a pair in turns.

The executor's loop knows of none of this, so that plain steps do not pay for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from drumline.runtime.execute.jobs import Job, nothing
from drumline.runtime.execute.overlap import run_both
from drumline.runtime.stash import Scale
from drumline.runtime.step import Step


def in_turns(job: Job) -> Job:
    """Return a job that runs both halves of a pair: one computes while the other waits for an exchange."""
    return _as_a_whole(job, partial(_run_in_turns, job))


def _run_in_turns(job: Job, _: int, step: Step) -> None:
    calls = [partial(part.call, part.microbatch, *part.take(part, step)) for part in job.parts]
    forward, backward = calls  # autograd runs in this thread
    for part, result in zip(job.parts, reversed(run_both(backward, forward)), strict=True):
        part.put(part, step, result)


def weighed(job: Job, scale: Scale) -> Job:
    """Return a job of a weighed step: the scale sees what autograd keeps of it."""
    return _as_a_whole(job, partial(_run_weighed, job, scale))


def _run_weighed(job: Job, scale: Scale, _: int, step: Step) -> None:
    with scale.watching():
        for part in job.parts or (job,):
            part.put(part, step, part.call(part.microbatch, *part.take(part, step)))
            if job.parts:
                scale.weigh()  # between the two, the stash holds both the forward's and the backward's


def _as_a_whole(job: Job, run: Callable[[int, Step], None]) -> Job:
    """Return a job with the same needs that takes, computes and puts by one function."""
    return replace(job, parts=(), take=_step_alone, call=run, put=nothing)


def is_whole(job: Job) -> bool:
    """Whether a job takes, computes and puts by one function."""
    return job.take is _step_alone


def _step_alone(job: Job, step: Step) -> tuple[Any, ...]:
    return (step,)
