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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from drumline.core.backwards import Backward
from drumline.core.costs import Edge
from drumline.core.errors import PlanError, ScheduleError, nearest
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.stages import Stages
from drumline.plan.device.candidate import EQUAL, Candidate
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.reasons import nothing_fits
from drumline.plan.search.search import search
from drumline.schedules import Schedule, find, schedules

OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}  # tensors of the weights' size that each keeps
CHECKPOINTING = ("none", "full")
_SEARCHED = 3  # combinations for which programs are searched
_MOST_MICROBATCHES = 128
_EVERY_STAGE = 4  # stages up to which every choice of those to recompute is tried
_EVERY_RANK = 4


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
    asked = Planner(
        known, ranks, batch, optimizer, _names(schedules), tuple(checkpoint), seconds, progress, stages_per_rank
    )
    return asked.planned()


@dataclass(frozen=True)
class Planner:
    """One question: a profile, ranks and a batch."""

    profile: ModelProfile
    ranks: Ranks
    batch: int
    optimizer: str
    schedules: tuple[str, ...]
    checkpoint: tuple[str, ...]
    seconds: float
    progress: Callable[[str], None] | None = None
    stages_per_rank: int | None = None
    only: tuple[int, ...] = ()  # sizes of microbatches; all that the profile has unless given

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"unknown optimizer {self.optimizer!r}", fix=nearest(self.optimizer, OPTIMIZERS))
        for one in self.checkpoint:
            if one not in CHECKPOINTING:
                raise PlanError(f"unknown checkpointing {one!r}", fix=nearest(one, CHECKPOINTING))
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise PlanError(f"a batch of {self.batch!r} rows", expected="a whole number of 1 or more")
        if self.ranks.num_ranks > len(self.profile.layers):
            raise PlanError(
                f"{self.ranks.num_ranks} ranks for the model's {len(self.profile.layers)} blocks",
                expected="at least one block per rank",
                fix=f"use {len(self.profile.layers)} ranks or fewer",
            )

    def planned(self) -> Planned:
        """Return the best plan, what it was chosen from, and what does not fit."""
        found = list(self.combinations())
        fitting, rejected = [one for one in found if one.fits], [one for one in found if not one.fits]
        if not fitting:
            raise nothing_fits(self, sorted(rejected, key=lambda one: one.largest_share))
        fitting.sort(key=lambda one: one.step_seconds)
        fitting = self._with_searched(fitting)
        best = _chosen(fitting)
        fitting = [best, *(one for one in fitting if one is not best)]
        rejected.sort(key=lambda one: one.cut.excess)
        return Planned(best.plan(self.profile, self.optimizer), tuple(fitting), tuple(rejected))

    def combinations(self) -> Iterator[Candidate]:
        """Yield everything with its best cut: the shortest step that fits, or the one that is over by the least."""
        sizes = self.sizes()
        for number, rows in enumerate(sizes):
            self._say(f"microbatches of {rows} rows ({number + 1} of {len(sizes)} sizes) ...")
            for program in self._programs(self.batch // rows):
                for order in self.ranks.orders():
                    yield from self._checkpointed(reordered(program, order), rows)

    def _checkpointed(self, program: Program, rows: int) -> Iterator[Candidate]:
        """Yield a program without checkpointing, and with it where without it the best cut of all does not fit."""
        if "none" in self.checkpoint:
            stages = self.stages(program, rows, (False,) * program.num_stages)
            best, free = stages.best()
            yield Candidate(stages, best, rows, self.batch)
            if free.excess == 0:
                return  # recomputing could only make the step longer
        if "full" in self.checkpoint:
            for again in _recomputed(program, partly="none" in self.checkpoint):
                stages = self.stages(program, rows, again)
                yield Candidate(stages, stages.best()[0], rows, self.batch)

    def stages(self, program: Program, rows: int, recompute: tuple[bool, ...]) -> Stages:
        """Return the cuts of one program, for microbatches of so many rows."""
        return Stages(
            self.profile.at(rows),
            program,
            self.ranks,
            self.profile.overheads,
            recompute,
            OPTIMIZERS[self.optimizer],
        )

    def sizes(self) -> list[int]:
        """Return the sizes of microbatches to try: those that divide the batch and were measured, or lie between."""
        if self.only:
            return list(self.only)
        low, high = self.profile.rows[0], self.profile.rows[-1]
        found = [
            rows
            for rows in range(low, min(high, self.batch) + 1)
            if self.batch % rows == 0 and self.batch // rows <= _MOST_MICROBATCHES
        ]
        if not found:
            few = "no size of microbatch was measured that divides it"
            raise PlanError(
                f"a batch of {self.batch} rows: {'it is smaller than any microbatch' if self.batch < low else few}",
                expected=f"a multiple of a size from {low} to {high}, in at most {_MOST_MICROBATCHES} microbatches",
                fix="profile other sizes with --microbatch-sizes, or plan for another batch",
            )
        return found

    def _programs(self, num_microbatches: int) -> Iterator[Program]:
        """Yield the program of every schedule that admits the counts."""
        for name in self.schedules:
            recipe = find(name)
            finer = [2, 3, 4] if recipe.stage_counts != "fixed" and recipe.stages_per_rank > 1 else []
            for stages_per_rank in dict.fromkeys([recipe.stages_per_rank, *finer]):
                if stages_per_rank * self.ranks.num_ranks > len(self.profile.layers):
                    continue
                if self.stages_per_rank not in (None, stages_per_rank):
                    continue
                try:
                    program = recipe.build(self.ranks.num_ranks, num_microbatches, stages_per_rank)
                except ScheduleError:
                    continue
                if not program.placement.mirrored and program.has_backward and not program.num_updates:
                    yield program

    def _with_searched(self, fitting: list[Candidate]) -> list[Candidate]:
        """Return the candidates with programs that were searched for the best few of them, the shortest step first."""
        kinds: dict[object, Candidate] = {}
        for one in fitting:
            kinds.setdefault((one.rows, one.program.placement.homes, one.stages.recompute), one)
        wanted = [one for one in kinds.values() if _is_whole(one)][:_SEARCHED]
        found, began = list(fitting), time.monotonic()
        for number, one in enumerate(wanted):
            left = (self.seconds - (time.monotonic() - began)) / (len(wanted) - number)
            if left <= 0:
                break
            self._say(f"searching programs like {one.program.name} ({number + 1} of {len(wanted)}) ...")
            better = self._searched(one, left)
            if better is not None:
                found.append(better)
        return sorted(found, key=lambda one: one.step_seconds)

    def _searched(self, start: Candidate, seconds: float) -> Candidate | None:
        """Return the candidate with the best program found for its stages, if that takes less time."""
        costs, placement = start.stages.costs_for_search(start.cut.counts), start.program.placement
        limit = None
        if self.ranks.is_limited:
            # One limit for all ranks: those that may hold less are taken to hold the difference already.
            most = max(one for one in self.ranks.limits if one < math.inf)
            weights = list(costs.per_stage("weight_bytes", placement.num_stages))
            for rank, own in enumerate(self.ranks.limits):
                if own < most:
                    weights[placement.stages_of(rank)[0]] += most - own
            costs, limit = replace(costs, weight_bytes=weights), Limit(max_bytes=most)
        try:
            found = search(
                costs, placement, num_microbatches=start.program.num_microbatches, limit=limit, seconds=seconds
            )
        except PlanError:
            return None  # one limit for all ranks is tighter than theirs
        assert not validate(found.program), "the search returns programs that can run"
        program = Program(found.program.rows, f"searched, {placement.name}")
        stages = replace(start.stages, program=program)
        candidate = Candidate(stages, stages.cuts([start.cut.counts])[0], start.rows, self.batch, searched=True)
        return candidate if candidate.fits and candidate.step_seconds < start.step_seconds * (1 - 1e-6) else None

    def _say(self, what: str) -> None:
        if self.progress is not None:
            self.progress(what)


def reordered(program: Program, order: Sequence[int]) -> Program:
    r"""Return the program with rank `order[r]` in the place of rank r.

    >>> print(reordered(Program.parse("0F0,0B0\n1F0,1B0"), [1, 0]))
    1F0,1B0
    0F0,0B0
    """
    if list(order) == sorted(order):
        return program
    rows = dict(zip(order, program.rows, strict=True))
    return Program(tuple(rows[rank] for rank in range(program.num_ranks)), program.name)


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


def _recomputed(program: Program, *, partly: bool) -> Iterator[tuple[bool, ...]]:
    """Yield which stages to recompute: those of the first rank on the way, of more, ..., of all; or all alone.

    Of up to four stages every choice is tried, of up to four ranks every number of them, of more the first, a quarter,
    half and all.
    """
    homes = program.placement.homes
    if partly and len(homes) <= _EVERY_STAGE:
        yield from (again for again in product((False, True), repeat=len(homes)) if any(again))
        return
    ranks = list(dict.fromkeys(homes))
    some = range(1, len(ranks)) if len(ranks) <= _EVERY_RANK else [1, len(ranks) // 4, len(ranks) // 2]
    for number in dict.fromkeys([*(some if partly else []), len(ranks)]):
        yield tuple(home in ranks[:number] for home in homes)


def _is_whole(candidate: Candidate) -> bool:
    """Whether every stage has a whole backward: others the search does not know."""
    return all(kind is Backward.WHOLE for kind in candidate.stages.pruned(candidate.cut.counts).backwards)
