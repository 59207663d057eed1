"""Place other stages on the ranks: a choice for the set-up, because a running pipeline keeps its stages in place.

    1f1b               18 | 6              blocks with experts take as long as three others: no cut is even
    interleaved-1f1b   8 | 9 | 4 | 3       two stages per rank: a rank's pieces add up to an even sum

All schedules and numbers of stages per rank are simulated with their best cuts. That needs blocks that were timed one
by one before the run, with whole and with split backwards: shares of a stage's time would decide too much.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from drumline.core.rules import Backward
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.plan.device.advice import LEAST_GAIN, Remedy, predicted
from drumline.plan.device.candidate import Candidate
from drumline.plan.device.overheads import Overheads
from drumline.plan.device.placements import arrangements
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.stages import Stages
from drumline.report.advise.cut import blocks_of
from drumline.report.advise.evidence import Evidence
from drumline.report.advise.timed_blocks import profile_of

_MOST_HELD = 1.5  # times the activations held now: more may not fit, and a report does not know the limit


def other_placement(evidence: Evidence) -> Iterator[Remedy]:
    """Yield the best arrangement with other stages per rank, if it beats the best one with the same places."""
    program, plan = evidence.program, evidence.plan or {}
    blocks = blocks_of(plan, program, evidence.costs)
    if blocks is None or blocks.basis != "profile" or not _is_plain(evidence):
        return
    profile = profile_of(plan, blocks)
    ranks = Ranks.of(program.num_ranks, rank_speeds=[1 / speed for speed in blocks.speed])
    flight = median(edge.latency for edge in evidence.costs.edges.values()) if evidence.costs.edges else 0.0
    overheads = Overheads(flight=flight)
    now = Stages(profile, program, ranks, overheads, (False,) * program.num_stages)
    before = now.cuts.timed([blocks.counts])[0].seconds

    def gain(candidate: Candidate) -> float:
        actions = candidate.program.num_actions / program.num_actions
        return evidence.share_saved(before, candidate.step_seconds, actions)

    candidates = arrangements(profile, ranks, program.num_microbatches, overheads=overheads)
    most = _MOST_HELD * _peak_microbatches(simulate(program))
    here = [gain(each) for each in candidates if each.program.placement == program.placement]
    elsewhere = (each for each in candidates if each.program.placement != program.placement)
    others = [each for each in elsewhere if _peak_microbatches(simulate(each.program)) <= most]
    if not others:
        return
    # Among gains that differ by less than is worth a change, the fewest stages, and then what holds the least.
    near = max(map(gain, others)) - LEAST_GAIN
    close = [each for each in others if gain(each) >= near]
    best = min(
        close, key=lambda each: (each.program.num_stages, _peak_microbatches(simulate(each.program)), -gain(each))
    )
    if gain(best) < max(here, default=0.0) + LEAST_GAIN:
        return
    yield Remedy("placement", _said(evidence, best, gain(best)), gain(best), _settings(best))


def _is_plain(evidence: Evidence) -> bool:
    """Whether every block trains in full, is computed once, and is in one place: what timed blocks describe."""
    program, plan = evidence.program, evidence.plan or {}
    return (
        set(program.backwards) == {Backward.WHOLE}
        and not program.num_updates
        and not program.placement.mirrored
        and all(share == 1 for share in plan.get("trained_shares") or ())
        and not any(plan.get("checkpoint") or ())
    )


def _settings(candidate: Candidate) -> dict[str, object]:
    program = candidate.program
    per_rank = program.num_stages // program.num_ranks
    return {"schedule": program.name, "stages_per_rank": per_rank, "balance": list(candidate.cut.counts)}


def _peak_microbatches(simulation: Simulation) -> float:
    """Return the most microbatches whose activations a rank holds, where all its stages hold alike."""
    program = simulation.program
    return max(simulation.peak_activations) * program.num_ranks / program.num_stages


def _said(evidence: Evidence, best: Candidate, gain: float) -> str:
    settings = ", ".join(f"{name}={value!r}" for name, value in _settings(best).items())
    per_rank = best.program.num_stages // best.program.num_ranks
    peak, higher = _peak_microbatches(simulate(evidence.program)), _peak_microbatches(simulate(best.program))
    memory = f", holding activations of {higher:g} microbatches instead of {peak:g}" if higher > peak else ""
    placed = f"{per_rank} stages" if per_rank > 1 else "one stage"
    return f"At set-up, place {placed} on every rank ({settings}), {predicted(gain)}{memory}"
