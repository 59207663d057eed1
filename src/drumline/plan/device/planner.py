"""`plan`: decide how to run a profiled model on given ranks.

It decides everything together: microbatches, schedule, stages per rank, checkpointing, the order of the ranks, and the
cut. Each combination gets the best cut that fits (`stages`), simulated with all measurements: blocks, messages, the
executor's own work. For the best few, it also searches for programs.

The objective, in this order:

1. Every rank's peak fits in its memory minus the headroom. A plan that does not fit is never returned.
2. The step is the shortest: compute + recompute + bubble + communication. Steps within 1% count as equal, because no
   prediction is more accurate than that.
3. Among equal steps, the fullest rank holds the least: the stash. Peaks within 1% also count as equal.
4. Then: the fewest bytes sent, a named schedule before a searched one, and the shortest step.

If nothing fits, the error names the smallest changes that would help.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from drumline.core.costs import Edge
from drumline.core.errors import PlanError, counted
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.rules import Backward
from drumline.core.timeline.idle import Limit
from drumline.plan.device.advice import less_activations
from drumline.plan.device.candidate import EQUAL, Candidate
from drumline.plan.device.combinations import CHECKPOINTING, Question, is_suited, suited
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.sliced import sliced_candidates
from drumline.plan.search.search import search
from drumline.schedules import DEFAULT, find

_MIB = 2**20
_SEARCHED = 3  # number of combinations for which to search programs


@dataclass(frozen=True)
class Planned:
    """The plan and its alternatives, the best first; `rejected` ones do not fit, the nearest first."""

    best: Plan
    candidates: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]

    @property
    def chosen(self) -> Candidate:
        """The candidate that became the plan."""
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
    slices: bool = True,
    rank_speeds: Sequence[float] | None = None,
    rank_memory: Sequence[float] | None = None,
    links: Mapping[tuple[int, int], Edge] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Planned:
    """Return the best plan for a batch of `batch` rows, and its alternatives; PlanError says why none fits.

    `memory_bytes` is what every rank has; the share `headroom` of it stays free. `rank_memory` and `rank_speeds` are
    for ranks that differ, `links` for messages over links that were not profiled. `seconds` is the budget for searching
    programs; 0 disables the search. With a profile of slices, plans of few microbatches may divide sequences into
    slices, unless `slices` is False.

    >>> from drumline.plan.device.blocks import ProfiledBlock, Profile, OpTimes
    >>> from drumline.plan.device.model_profile import Identity
    >>> layers = [ProfiledBlock(name, OpTimes(1.0, 2.0, 1.0, 1.0), 8, 4, 0, 2, 2, 1) for name in "abcd"]
    >>> one_row = Profile(tuple(layers), OpTimes(0.0, 0.0, 0.0, 0.0), "cpu", 5)
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
    question = Question(
        known, ranks, batch, optimizer, _names(schedules), tuple(checkpoint), seconds, progress, stages_per_rank
    )
    candidates = list(question.combinations())
    candidates += sliced_candidates(question, candidates) if slices else ()
    fitting, rejected = [candidate for candidate in candidates if candidate.fits], [c for c in candidates if not c.fits]
    if not fitting:
        raise _nothing_fits(question, sorted(rejected, key=lambda candidate: candidate.largest_share))
    fitting.sort(key=lambda candidate: candidate.step_seconds)
    fitting = _with_searched(question, fitting)
    best = _chosen(fitting)
    fitting = [best, *(candidate for candidate in fitting if candidate is not best)]
    rejected.sort(key=lambda candidate: candidate.cut.excess)
    return Planned(best.plan(question.profile, question.optimizer), tuple(fitting), tuple(rejected))


def _with_searched(question: Question, fitting: list[Candidate]) -> list[Candidate]:
    """Return the candidates plus programs that were searched for the best few, the shortest step first."""
    kinds: dict[object, Candidate] = {}
    for candidate in fitting:
        kinds.setdefault((candidate.rows, candidate.program.placement.homes, candidate.stages.recompute), candidate)
    wanted = [kind for kind in kinds.values() if _is_whole(kind)][:_SEARCHED]
    candidates, began = list(fitting), time.monotonic()
    for number, candidate in enumerate(wanted):
        left = (question.seconds - (time.monotonic() - began)) / (len(wanted) - number)
        if left <= 0:
            break
        question.say(f"searching programs like {candidate.program.name} ({number + 1} of {len(wanted)}) ...")
        better = _searched(question, candidate, left)
        if better is not None:
            candidates.append(better)
    return sorted(candidates, key=lambda candidate: candidate.step_seconds)


def _searched(question: Question, start: Candidate, seconds: float) -> Candidate | None:
    """Return the candidate with the best program found for its stages, if it is faster."""
    costs, placement = start.stages.costs_for_search(start.cut.counts), start.program.placement
    limit = None
    if question.ranks.is_limited:
        # The search takes one limit for all ranks; ranks with a smaller limit count as already holding the difference.
        most = max(value for value in question.ranks.limits if value < math.inf)
        weights = list(costs.per_stage("weight_bytes", placement.num_stages))
        for rank, own_limit in enumerate(question.ranks.limits):
            if own_limit < most:
                weights[placement.stages_of(rank)[0]] += most - own_limit
        costs, limit = replace(costs, weight_bytes=weights), Limit(max_bytes=most)
    try:
        result = search(costs, placement, num_microbatches=start.program.num_microbatches, limit=limit, seconds=seconds)
    except PlanError:
        return None  # a single limit for all ranks is tighter than theirs
    assert not validate(result.program), "the search returns programs that can run"
    program = Program(result.program.rows, f"searched, {placement.name}")
    stages = replace(start.stages, program=program)
    candidate = Candidate(stages, stages.cuts.timed([start.cut.counts])[0], start.rows, question.batch, searched=True)
    return candidate if candidate.fits and candidate.step_seconds < start.step_seconds * (1 - 1e-6) else None


def _names(asked: Sequence[str] | None) -> tuple[str, ...]:
    """Return the schedules to try: the requested ones, or all that can be planned."""
    if asked is None:
        return suited()
    for name in asked:
        if not is_suited(find(name)):
            raise PlanError(
                f"{name} cannot be planned from a profile",
                expected="a flushed schedule with one copy of every stage",
                fix=f"leave it out; these can be planned: {', '.join(suited())}",
            )
    if not asked:
        raise PlanError("schedules is empty", expected="one name or more")
    return tuple(asked)


def _chosen(fitting: Sequence[Candidate]) -> Candidate:
    """Return the best of what fits, by the objective."""
    shortest = min(candidate.step_seconds for candidate in fitting)
    near = [candidate for candidate in fitting if candidate.step_seconds <= shortest * (1 + EQUAL)]
    smallest = min(candidate.peak for candidate in near)
    near = [candidate for candidate in near if candidate.peak <= smallest * (1 + EQUAL)]
    return min(near, key=lambda candidate: (candidate.sent_bytes, candidate.searched, candidate.step_seconds))


def _is_whole(candidate: Candidate) -> bool:
    """Whether every stage has a whole backward, of whole sequences; the search supports no others."""
    if candidate.program.num_slices > 1:
        return False
    return all(kind is Backward.WHOLE for kind in candidate.stages.cuts.pruned(candidate.cut.counts).backwards)


def _nothing_fits(question: Question, rejected: Sequence[Candidate]) -> PlanError:
    """Return the error when nothing fits; `rejected` has the nearest first."""
    if not rejected:
        return PlanError(
            "no schedule supports these counts",
            expected=f"one of {', '.join(question.schedules)} for {counted(question.ranks.num_ranks, 'rank')}",
            fix="choose other schedules, or a batch that splits into more microbatches",
        )
    nearest = rejected[0]
    rank, over = nearest.over
    items, limit = nearest.rank_bytes[rank], question.ranks.limits[rank]
    needs = less_activations(over, items.stash) or (
        f"{over / _MIB:.1f} MiB less: weights, gradients and optimizer state alone take"
        f" {(items.total - items.stash) / _MIB:.1f} MiB"
    )
    share = max(size / own_bytes for size, own_bytes in zip(nearest.cut.rank_bytes, question.ranks.memory, strict=True))
    enough = math.ceil(max(question.ranks.memory) * share / (1 - question.ranks.headroom))
    error = PlanError(
        f"nothing fits: the smallest of {counted(len(rejected), 'combination')}"
        f" ({nearest.program.name}, {_how(nearest)}) holds {items.total / _MIB:.1f} MiB on rank {rank},"
        f" whose limit is {limit / _MIB:.1f} MiB",
        expected=needs,
        fix=", or ".join([*_mends(question, nearest), f"{enough / _MIB:.1f} MiB per rank (--memory {enough})"]),
    )
    error.smallest_bytes = enough
    return error


def _how(candidate: Candidate) -> str:
    full = sum(candidate.stages.recompute)
    again = "" if not full else ", recomputed" if full == len(candidate.stages.recompute) else ", partly recomputed"
    return f"{counted(candidate.program.num_microbatches, 'microbatch')} of {candidate.rows}{again}"


def _mends(question: Question, nearest: Candidate) -> Iterator[str]:
    """Yield changes that would each be enough, for the schedule that is nearest to fitting."""
    quiet = replace(question, seconds=0.0, progress=None, schedules=(nearest.program.name,), only=(nearest.rows,))
    if "full" not in question.checkpoint:
        fitting = [rival for rival in replace(quiet, checkpoint=("none", "full")).combinations() if rival.fits]
        if fitting:
            fewest = min(fitting, key=lambda candidate: sum(candidate.stages.recompute))
            homes = zip(fewest.program.placement.homes, fewest.stages.recompute, strict=True)
            there = sorted({home for home, again in homes if again})
            yield f"full checkpointing on {'rank' if len(there) == 1 else 'ranks'} {', '.join(map(str, there))}"
    if question.optimizer != "sgd" and _some_fit(replace(quiet, optimizer="sgd")):
        yield "an optimizer without state (--optimizer sgd)"
    memory = min(question.ranks.memory)
    for num_ranks in range(question.ranks.num_ranks + 1, min(len(question.profile.layers), 64) + 1):
        ranks = Ranks.of(num_ranks, memory_bytes=memory, headroom=question.ranks.headroom)
        if _some_fit(replace(quiet, ranks=ranks, schedules=(DEFAULT,))):
            yield f"{num_ranks} ranks"
            break
    if question.profile.rows[0] > 1 and nearest.over[1] < nearest.rank_bytes[nearest.over[0]].stash:
        yield "smaller microbatches (profile again with --microbatch-sizes 1)"


def _some_fit(question: Question) -> bool:
    return any(combination.fits for combination in question.combinations())
