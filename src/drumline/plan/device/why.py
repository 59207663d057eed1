"""Why nothing fits, and the least that would have to change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from drumline.core.errors import PlanError, counted
from drumline.plan.device.candidate import Candidate
from drumline.plan.device.combinations import Question
from drumline.plan.device.ranks import Ranks
from drumline.plan.why import less_activations
from drumline.schedules import DEFAULT

_MIB = 2**20


def nothing_fits(question: Question, rejected: Sequence[Candidate]) -> PlanError:
    """Return the error for a model that fits nowhere, `rejected` being the nearest first."""
    if not rejected:
        return PlanError(
            "no schedule admits these counts",
            expected=f"one of {', '.join(question.schedules)} for {counted(question.ranks.num_ranks, 'rank')}",
            fix="name other schedules, or a batch that divides into more microbatches",
        )
    nearest = rejected[0]
    rank, over = nearest.over
    items, limit = nearest.rank_bytes[rank], question.ranks.limits[rank]
    needs = less_activations(over, items.stash) or (
        f"{over / _MIB:.1f} MiB less: weights, gradients and the optimizer's state alone take"
        f" {(items.total - items.stash) / _MIB:.1f} MiB"
    )
    share = max(size / own for size, own in zip(nearest.cut.rank_bytes, question.ranks.memory, strict=True))
    enough = math.ceil(max(question.ranks.memory) * share / (1 - question.ranks.headroom))
    error = PlanError(
        f"nothing fits: of {counted(len(rejected), 'combination')} the smallest"
        f" ({nearest.program.name}, {_how(nearest)}) holds {items.total / _MIB:.1f} MiB on rank {rank},"
        f" which may hold {limit / _MIB:.1f}",
        expected=needs,
        fix=", or ".join([*_mends(question, nearest), f"{enough / _MIB:.1f} MiB of memory a rank (--memory {enough})"]),
    )
    error.smallest_bytes = enough
    return error


def _how(candidate: Candidate) -> str:
    full = sum(candidate.stages.recompute)
    again = "" if not full else ", recomputed" if full == len(candidate.stages.recompute) else ", partly recomputed"
    return f"{counted(candidate.program.num_microbatches, 'microbatch')} of {candidate.rows}{again}"


def _mends(question: Question, nearest: Candidate) -> Iterator[str]:
    """Yield changes of which each alone would do, for the schedule that is nearest to fit."""
    quiet = replace(question, seconds=0.0, progress=None, schedules=(nearest.program.name,), only=(nearest.rows,))
    if "full" not in question.checkpoint:
        fitting = [one for one in replace(quiet, checkpoint=("none", "full")).combinations() if one.fits]
        if fitting:
            fewest = min(fitting, key=lambda one: sum(one.stages.recompute))
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
    return any(one.fits for one in question.combinations())
