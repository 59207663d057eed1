"""`plan`: what to run a profiled model by, on given ranks.

Everything is decided together: microbatches, schedule, stages per rank, checkpointing, the order of the ranks, and the
cut. Each combination gets the best cut that fits (`stages`), timed by simulation with everything that was measured:
blocks, messages, the executor's own work. For the best few, programs are searched as well.

The objective, in this order:

1. Every rank's peak is within its memory, less the headroom. What is not is never returned.
2. The step is the shortest: computing + recomputing + bubble + communication. Steps within 1% count as equal, because
   no prediction is better than that.
3. Of equal ones, the rank that holds most holds least: the stash. Peaks within 1% count as equal, too.
4. Then the fewest bytes are sent, a schedule with a name comes before a searched one, and the shortest step is first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drumline.core.costs import Edge
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.rules import Backward
from drumline.core.timeline.idle import Limit
from drumline.plan.device.candidate import EQUAL, Candidate
from drumline.plan.device.combinations import CHECKPOINTING, Question
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.why import nothing_fits
from drumline.plan.search.search import search
from drumline.schedules import Schedule, find, schedules

_SEARCHED = 3  # combinations for which programs are searched


@dataclass(frozen=True)
class Planned:
    """What was chosen and what it was chosen from, the best first; `rejected` does not fit, the nearest first."""

    best: Plan
    candidates: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The candidate that the plan was made of."""
        return self.candidates[0]


def plan(
    profile: ModelProfile | str | Path,
    *,
    num_ranks: int,
    batch: int,
    memory_bytes: float | None = None,
    headroom: float = 0.1,
    optimizer: str = "adam",
    schedules: Sequence[str] | None = None,
    checkpoint: Sequence[str] = CHECKPOINTING,
    stages_per_rank: int | None = None,
    seconds: float = 5.0,
    rank_speeds: Sequence[float] | None = None,
    rank_memory: Sequence[float] | None = None,
    links: Mapping[tuple[int, int], Edge] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Planned:
    """Return the best plan for a batch of so many rows, and what it was chosen from; PlanError says why none fits.

    `memory_bytes` is what every rank has, of which the share `headroom` stays free; `rank_memory` and `rank_speeds` are
    for ranks that differ, `links` for messages that go by other links than were profiled. `seconds` is the budget for
    searching programs; 0 leaves that out.

    >>> from drumline.plan.device.blocks import Layer, Profile, Times
    >>> from drumline.plan.device.model_profile import Identity
    >>> layers = [Layer(name, Times(1.0, 2.0, 1.0, 1.0), 8, 4, 0, 2, 2, 1) for name in "abcd"]
    >>> one_row = Profile(tuple(layers), Times(0.0, 0.0, 0.0, 0.0), "cpu", 5)
    >>> known = ModelProfile(Identity("abcd", 4, ""), "cpu", 2, 1, ((1, one_row),))
    >>> best = plan(known, num_ranks=2, batch=8, schedules=["gpipe", "1f1b"], seconds=0).best
    >>> best.schedule, best.counts, best.step_seconds
    ('1f1b', (2, 2), 54.0)
    """
    known = profile if isinstance(profile, ModelProfile) else ModelProfile.load(profile)
    ranks = Ranks.of(
        num_ranks,
        memory_bytes=memory_bytes,
        headroom=headroom,
        rank_speeds=rank_speeds,
        rank_memory=rank_memory,
        links=links,
    )
    asked = Question(
        known, ranks, batch, optimizer, _names(schedules), tuple(checkpoint), seconds, progress, stages_per_rank
    )
    return planned(asked)


def planned(question: Question) -> Planned:
    """Return the best plan, what it was chosen from, and what does not fit."""
    found = list(question.combinations())
    fitting, rejected = [one for one in found if one.fits], [one for one in found if not one.fits]
    if not fitting:
        raise nothing_fits(question, sorted(rejected, key=lambda one: one.largest_share))
    fitting.sort(key=lambda one: one.step_seconds)
    fitting = _with_searched(question, fitting)
    best = _chosen(fitting)
    fitting = [best, *(one for one in fitting if one is not best)]
    rejected.sort(key=lambda one: one.cut.excess)
    return Planned(best.plan(question.profile, question.optimizer), tuple(fitting), tuple(rejected))


def _with_searched(question: Question, fitting: list[Candidate]) -> list[Candidate]:
    """Return the candidates with programs that were searched for the best few of them, the shortest step first."""
    kinds: dict[object, Candidate] = {}
    for one in fitting:
        kinds.setdefault((one.rows, one.program.placement.homes, one.stages.recompute), one)
    wanted = [one for one in kinds.values() if _is_whole(one)][:_SEARCHED]
    found, began = list(fitting), time.monotonic()
    for number, one in enumerate(wanted):
        left = (question.seconds - (time.monotonic() - began)) / (len(wanted) - number)
        if left <= 0:
            break
        question.say(f"searching programs like {one.program.name} ({number + 1} of {len(wanted)}) ...")
        better = _searched(question, one, left)
        if better is not None:
            found.append(better)
    return sorted(found, key=lambda one: one.step_seconds)


def _searched(question: Question, start: Candidate, seconds: float) -> Candidate | None:
    """Return the candidate with the best program found for its stages, if that takes less time."""
    costs, placement = start.stages.costs_for_search(start.cut.counts), start.program.placement
    limit = None
    if question.ranks.is_limited:
        # One limit for all ranks: those that may hold less are taken to hold the difference already.
        most = max(one for one in question.ranks.limits if one < math.inf)
        weights = list(costs.per_stage("weight_bytes", placement.num_stages))
        for rank, own in enumerate(question.ranks.limits):
            if own < most:
                weights[placement.stages_of(rank)[0]] += most - own
        costs, limit = replace(costs, weight_bytes=weights), Limit(max_bytes=most)
    try:
        found = search(costs, placement, num_microbatches=start.program.num_microbatches, limit=limit, seconds=seconds)
    except PlanError:
        return None  # one limit for all ranks is tighter than theirs
    assert not validate(found.program), "the search returns programs that can run"
    program = Program(found.program.rows, f"searched, {placement.name}")
    stages = replace(start.stages, program=program)
    candidate = Candidate(stages, stages.cuts([start.cut.counts])[0], start.rows, question.batch, searched=True)
    return candidate if candidate.fits and candidate.step_seconds < start.step_seconds * (1 - 1e-6) else None


def _is_suited(schedule: Schedule) -> bool:
    """Whether a profile knows all that it does: no updates of its own, no exchange between copies, and a backward."""
    return schedule.flushed and schedule.trains and not schedule.two_directions


def _names(asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the schedules to try: those asked for, or all that a plan can be made of."""
    suited = tuple(name for name, one in schedules().items() if _is_suited(one) and not one.baseline)
    if asked is None:
        return suited
    for name in asked:
        if not _is_suited(find(name)):
            raise PlanError(
                f"{name} cannot be planned from a profile",
                expected="a flushed schedule with one copy of every stage",
                fix=f"leave it out; {', '.join(suited)} can",
            )
    if not asked:
        raise PlanError("no schedules", expected="one name or more")
    return tuple(asked)


def _chosen(fitting: Sequence[Candidate]) -> Candidate:
    """Return the best of what fits, by the objective."""
    shortest = min(one.step_seconds for one in fitting)
    near = [one for one in fitting if one.step_seconds <= shortest * (1 + EQUAL)]
    smallest = min(one.peak for one in near)
    near = [one for one in near if one.peak <= smallest * (1 + EQUAL)]
    return min(near, key=lambda one: (one.sent_bytes, one.searched, one.step_seconds))


def _is_whole(candidate: Candidate) -> bool:
    """Whether every stage has a whole backward: others the search does not know."""
    return all(kind is Backward.WHOLE for kind in candidate.stages.pruned(candidate.cut.counts).backwards)
