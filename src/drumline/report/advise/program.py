"""Change the program: the number of microbatches, or the schedule.

::

    more microbatches    fill and drain get shorter, because each microbatch is shorter
    fewer                there are fewer actions, each with its own overhead

Where few weights of a stage train, as adapters do, its backwards run whole in every schedule (`core/prove/whole.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.prove.whole import is_light, join
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.units import ms
from drumline.plan.device.advice import LEAST_GAIN, Remedy, predicted
from drumline.report.advise.cut import blocks_of
from drumline.report.advise.evidence import OPS, Evidence
from drumline.report.advise.timed_blocks import both_kinds, profile_of
from drumline.schedules import schedules
from drumline.schedules.registry import made_by

_FACTORS = (4, 2, 1 / 2, 1 / 4)
_HALVES = "assuming that W takes half of B"
_SHARES = "assuming that W takes as long as I, times the share of weights that train"
_LINEAR = "assuming that a microbatch's time is proportional to its rows"


def other_counts(evidence: Evidence) -> Iterator[Remedy]:
    """Yield the number of microbatches that is predicted to be the best, if it differs."""
    if evidence.plan is None:
        return
    program, now = evidence.program, evidence.program.num_microbatches
    best: tuple[float, int] = (LEAST_GAIN, now)
    for factor in _FACTORS:
        count = int(now * factor)
        if not 1 <= count <= rows_of_batch(evidence, most=4 * now):
            continue
        changed = made_by(program.name, program, count)
        if changed is not None:
            simulated = simulate(changed, _scaled(evidence.costs, program.num_stages, now / count))
            best = max(best, (_gain(evidence, simulated, count / now), count))
    gain, count = best
    if count == now:
        return
    settings = {"num_microbatches": count}
    if count > now:
        said = f"With {now} microbatches, {evidence.simulated.bubble:.0%} is bubble: split the batch into {count}"
    else:
        share = evidence.overhead / evidence.measured.makespan
        said = f"With {now} microbatches, {share:.0%} is overhead: split the batch into {count}"
    yield Remedy("microbatches", f"{said}, {predicted(gain)}", gain, settings, _LINEAR)


def other_schedule(evidence: Evidence) -> Iterator[Remedy]:
    """Yield the schedule that is predicted to be the best, if it differs, and one that holds less.

    If the pipeline is not ours, the executor's own time may change: then both schedules are compared at their best, and
    only schedules that hold no more count.
    """
    program, ours, shares = evidence.program, evidence.plan is not None, _trained_shares(evidence)
    light = [is_light(share, 1.0) for share in shares]
    if ours and (program.num_updates or program.placement.mirrored or _recipe(program, light) != program):
        return
    split = any(part.op is Op.BACKWARD_WEIGHT for part in program.work())
    timed = _timed(evidence, split=split)
    costs = timed or (evidence.costs if split else _divided(evidence.costs, shares))
    now = simulate(program, costs)
    others = [simulate(join(other, light), costs) for other in _others(program, elsewhere=not ours)]
    if ours:
        assumes = "" if timed or split or all(light) else _HALVES if set(shares) == {1.0} else _SHARES
        yield from _faster(evidence, now, others, assumes)
        yield from _smaller(now, others)
    else:
        yield from _at_best(evidence, now, others, split)


def _timed(evidence: Evidence, *, split: bool) -> Costs | None:
    """Return the costs with whole and split backwards as blocks were timed before the run; None if they were not."""
    plan = evidence.plan or {}
    blocks = blocks_of(plan, evidence.program, evidence.costs)
    if blocks is None or blocks.basis != "profile" or evidence.program.placement.mirrored:
        return None
    return both_kinds(evidence.costs, profile_of(plan, blocks), blocks, split=split)


def _trained_shares(evidence: Evidence) -> list[float]:
    """Return which share of its weights each stage trains; all of them if that is unknown."""
    shares: Sequence[float] = (evidence.plan or {}).get("trained_shares") or ()
    return list(shares) if len(shares) == evidence.program.num_stages else [1.0] * evidence.program.num_stages


def _recipe(program: Program, light: Sequence[bool]) -> Program | None:
    """Return what the schedule of a program makes for these stages; None if it is unknown."""
    new_program = made_by(program.name, program)
    return None if new_program is None else join(new_program, light)


def _others(program: Program, *, elsewhere: bool) -> Iterator[Program]:
    """Yield other schedules' programs that train the same stages with the same result, on the same ranks."""
    for name in schedules() if program.has_backward else ():
        other = None if name == program.name else made_by(name, program)
        if other is None or not other.has_backward or other.num_updates:
            continue
        if other.placement == program.placement or (elsewhere and not other.placement.mirrored):
            yield other


def _faster(evidence: Evidence, now: Simulation, others: list[Simulation], assumes: str) -> Iterator[Remedy]:
    gains = [(_gain(evidence, other, other.program.num_actions / now.program.num_actions), other) for other in others]
    # Among equal gains, to a thousandth, the one that holds the least.
    gain, best = max(gains, key=lambda pair: (round(pair[0], 3), -max(pair[1].peak_activations)), default=(0.0, now))
    if gain >= LEAST_GAIN:
        name, num_held, holds = best.program.name, max(now.peak_activations), max(best.peak_activations)
        memory = f", holding {holds} activations instead of {num_held}" if holds > num_held else ""
        sentence = f"Run {name} instead of {now.program.name}, {predicted(gain)}{memory}"
        yield Remedy("schedule", sentence, gain, {"schedule": name}, assumes)


def _smaller(now: Simulation, others: list[Simulation]) -> Iterator[Remedy]:
    """Yield the schedule that holds the least in the same time."""
    as_fast = [other for other in others if other.makespan <= now.makespan * 1.005]
    least = min(as_fast, key=lambda simulation: max(simulation.peak_activations), default=now)
    num_held, holds = max(now.peak_activations), max(least.peak_activations)
    if holds < num_held:
        sentence = (
            f"To save memory, run {least.program.name}: it holds {holds} activations, not {num_held}, in the same time"
        )
        yield Remedy("memory", sentence, 0.0, {"schedule": least.program.name})


def _at_best(evidence: Evidence, now: Simulation, others: list[Simulation], split: bool) -> Iterator[Remedy]:
    """Yield the fastest schedule that holds no more, both without transfer and overhead."""
    smaller = [other for other in others if max(other.peak_activations) <= max(now.peak_activations)]
    best = min(smaller, key=lambda simulation: simulation.makespan, default=now)
    if best is not now:
        guessed = not split and Op.BACKWARD_WEIGHT in best.program.columns.ops
        sentence = (
            f"Run {best.program.name}: with the median times of these stages it takes {ms(best.makespan)} at best and "
            f"{now.program.name} {ms(now.makespan)}, with no more activations held"
            + (", assuming that both halves of the backward take equally long" if guessed else "")
        )
        gain = (now.makespan - best.makespan) / evidence.measured.makespan
        yield Remedy("schedule", sentence, gain, {"schedule": best.program.name})


def rows_of_batch(evidence: Evidence, *, most: int) -> int:
    """Return how many rows a batch has, according to the metrics; `most` if they do not say."""
    rate, seconds = evidence.line.get("throughput(rows/s)"), evidence.line.get("time_metrics/end_to_end(s)")
    return int(rate * seconds + 0.5) if rate and seconds else most


def _gain(evidence: Evidence, changed: Simulation, actions: float) -> float:
    return evidence.share_saved(evidence.middle.makespan, changed.makespan, actions)


def _scaled(costs: Costs, num_stages: int, factor: float) -> Costs:
    scaled: dict[str, Any] = {op: [value * factor for value in costs.per_stage(op, num_stages)] for op in OPS}
    return replace(costs, **scaled)


def _divided(costs: Costs, shares: Sequence[float]) -> Costs:
    """Return the costs with whole backwards divided into I and W, by the share of weights that each stage trains.

    >>> _divided(Costs(backward_input=2.0, backward_weight=0.0), [1.0, 0.25]).backward_weight
    [1.0, 0.4]
    """
    whole = costs.per_stage("backward_input", len(shares))
    weight = [value * share / (1 + share) for value, share in zip(whole, shares, strict=True)]
    rest = [value - later for value, later in zip(whole, weight, strict=True)]
    return replace(costs, backward_input=rest, backward_weight=weight)
